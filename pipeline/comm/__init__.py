"""Process groups, pipeline links and rendezvous of one generation."""
