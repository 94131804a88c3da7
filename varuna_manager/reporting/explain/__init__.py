"""Why a job did what it did: the chain of causes in its journal, in people's words."""
