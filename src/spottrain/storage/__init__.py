"""Checkpoint stores: a folder or a bucket behind one protocol."""
