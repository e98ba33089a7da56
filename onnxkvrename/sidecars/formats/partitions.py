"""Partitions, settings and specializations: known files without names of inputs or outputs.

They name nodes and symbols, which a rename keeps, so these files never change.
"""

from __future__ import annotations

import re

from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.json_tree import parse_json_tree

FORMAT = SidecarFormat(
    caption="partitions, settings and symbols",
    priority=50,
    expected_form="names of nodes and symbols",
    parse=parse_json_tree,
    find_names=None,
    file_name_pattern=re.compile(r"qconfig\.json|specializations\.json|mdp_.*\.json"),
    markers=(b'"nodeList"', b'"partitions"'),
)
