"""One job on disk and in its bucket: folder, journal, identity, replication."""
