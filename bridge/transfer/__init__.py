"""Transfer agents: how packed bytes cross from one process's memory to another's."""
