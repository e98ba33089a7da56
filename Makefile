# vLLM's own code, from its wheels, against projections of drawn architectures: docs/vllm.md.
# Needs Python 3.11 or later, 6 GB of disk, 2 GB of memory, and a quarter of an hour on two cores.
COUNT = 3200
WITNESS = build/witness

.PHONY: witness
witness:
	python3 -m venv $(WITNESS)/venv
	$(WITNESS)/venv/bin/python -m pip install -q numpy torch
	for version in 0.24.0 0.33.0; do \
	    $(WITNESS)/venv/bin/python -m pip download -q --no-deps -d $(WITNESS)/wheels \
	        vllm==$$version || exit 1; \
	done
	$(WITNESS)/venv/bin/python tests/judge_vllm.py -n $(COUNT)
