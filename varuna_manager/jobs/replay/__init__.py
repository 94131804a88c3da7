"""How a job's state is kept in its journal and brought back: nothing is decided twice."""
