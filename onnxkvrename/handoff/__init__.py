"""Consumers of KV buffers, and prefill against decode.

One consumer and one layout:

- ``consumer``: the type `Consumer`; ``consumers/`` has one file for each built-in one, and
  ``find_consumers`` finds it by its name.
- ``selection``: the graph values that a consumer selects, in its order. Its `ConsumerView` is what
  every check gets.
- ``slots``: the memory that it hands over, one slot for each selected input.
- ``consumer_checks``: checks one layout for a consumer (KV601 to KV610); those that are about names
  are in ``name_checks``.

Two layouts: ``compare`` (start here) goes from sides to facts, findings and the verdict, and
collects them in a `Handoff`.

- Sides: ``worker`` describes prefill and decode, each with its longest prompt; ``side_checks`` adds
  what the consumer sees of each, from which all else starts.
- Facts: ``comparison`` pairs the buffers of both sides and lists how the two of a pair differ;
  ``simulate`` finds the prompt lengths at which a buffer goes wrong, from offsets alone.
- Findings: ``side_checks`` about each side by itself, ``verdict`` about their buffers.
- Verdict: ``verdict`` says which findings explain others, what becomes of each buffer and of each
  prompt, and why.
"""
