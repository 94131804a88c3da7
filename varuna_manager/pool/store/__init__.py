"""One pool on disk: its folder, its journal, and how commands reach its daemon."""
