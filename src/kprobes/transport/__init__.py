"""Sockets, processes, RAM: the only ones in the project."""
