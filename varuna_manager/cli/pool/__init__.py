"""Commands on pools: ``spottrain pool ...``, and ``spottrain launch --pool``."""
