"""The pool's process: journals what happens, and tells jobs what they are granted."""
