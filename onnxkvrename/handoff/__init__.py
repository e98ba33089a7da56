"""Consumers of KV buffers, and prefill against decode.

One consumer and one layout:

- ``consumer``: the type `Consumer`.
- ``consumers/``: one file for each built-in consumer.
- ``find_consumers``: finds a consumer by its name.
- ``selection``: the graph values that a consumer selects, in its order.
- ``slots``: the memory that it hands over, one slot for each selected input.
- ``consumer_checks``: checks one layout for a consumer (KV601 to KV610).
- ``name_checks``: those of these checks that are about names.

Two layouts, in the order of the steps of ``compare``:

- ``compare``: runs the steps below and collects their results in a `Handoff`; start here.
- ``worker``: describes one side, prefill or decode, with its longest prompt.
- ``side_checks``: checks each side by itself, with ``consumer_checks``, and whether both sides are
  the same model.
- ``simulate``: finds the prompt lengths at which a buffer goes wrong, from offsets alone.
- ``comparison``: pairs the buffers of both sides, lists how the two of a pair differ, and runs the
  simulation. The next steps work on its result.
- ``root_causes``: finds the problems that cause others, and reports only those.
- ``tensor_parallel``: checks that heads and states can be divided among the ranks of both sides.
- ``verdict``: decides whether the hand-off works, and which causes affect which prompts.
"""
