"""The user's model: loaded, traced, cut into sections, run stage by stage."""
