"""Built-in consumers of KV buffers, with one file for each.

A consumer is a module of this package with a `Consumer` named ``CONSUMER``. Its name for
``--target`` is the name of its file, with ``-`` for ``_``. Beside it, only the table
``CONSUMER_TOKENS`` of `rules.checks` has its token, by which a rename knows it in other capitals.
This is a complete ``pigeon_post.py``, for a consumer that receives whole buffers with the token
``pigeon``::

    from onnxkvrename.handoff.consumer import Consumer

    CONSUMER = Consumer(
        name="pigeon-post",
        token="pigeon",
        selects_input=lambda name: name.endswith("_pigeon"),
        selects_output=lambda name: name.endswith("_pigeon_RetainedState"),
        input_name_of=lambda name: name.removesuffix("_RetainedState"),
        sort_key=lambda name: (int(name.partition(".")[2].partition("_")[0]), name),
        itemsize_of={"FLOAT16": 2, "FLOAT": 4}.get,
    )
"""
