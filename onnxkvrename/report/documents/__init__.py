"""JSON documents for programs, with one file for each command that has a large one."""
