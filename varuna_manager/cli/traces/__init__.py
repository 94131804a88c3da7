"""Commands that record what the ranks of a running job do: profile, timeline."""
