"""Consumers of KV buffers, and prefill against decode.

One consumer and one layout:

- ``consumer``: the type `Consumer`.
- ``consumers/``: one file for each built-in consumer.
- ``find_consumers``: finds a consumer by its name.
- ``selection``: the graph values that a consumer takes, in its order.
- ``slots``: the memory that it hands over, one slot for each selected input.
- ``consumer_checks``: checks one layout at a consumer (KV601 to KV610), also without a partner.
- ``name_checks``: those of the checks that are about names.

Two layouts, in the order of the steps of ``compare``:

- ``compare``: the entry; runs the steps below and collects their results in a `Handoff`.
- ``worker``: describes one side, prefill or decode, with its longest prompt.
- ``side_checks``: checks each side by itself, with ``consumer_checks``, and compares tokens.
- ``simulate``: finds the prompt lengths at which a buffer goes wrong, from offsets alone.
- ``comparison``: pairs the buffers of both sides, lists how the two of a pair differ, and holds
  these facts and the simulation for the next two steps.
- ``root_causes``: finds the differences that cause others, and reports only those.
- ``tensor_parallel``: checks that heads and states divide by the ranks of both sides.
- ``verdict``: decides what becomes of the hand-off, and which causes go with which prompts.
"""
