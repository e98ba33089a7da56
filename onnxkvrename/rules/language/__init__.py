"""The parts of rules that only some profiles have: kinds as tables, axes, branches; mistakes."""
