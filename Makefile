# vLLM's own code, from its wheel, against projections of drawn architectures: docs/inspect.md.
# Needs Python 3.11 or later, 6 GB of disk, 2 GB of memory, and a few minutes on two cores.
COUNT = 3200
WITNESS = build/witness

.PHONY: witness
witness:
	python3 -m venv $(WITNESS)/venv
	$(WITNESS)/venv/bin/python -m pip install -q numpy torch
	$(WITNESS)/venv/bin/python -m pip download -q --no-deps -d $(WITNESS)/wheels vllm==0.24.0
	$(WITNESS)/venv/bin/python tests/judge_vllm.py -n $(COUNT)
