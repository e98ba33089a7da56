"""Two workers of different ranks and blocks; what is refused, and what is noted."""

from __future__ import annotations

import pytest
from build_layouts import (
    build_attention,
    build_gpt_oss,
    build_layers,
    build_linear,
    build_mla,
    build_sliding,
)

from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.handshake import Handshake, check_handshake
from onnxkvrename.vllm.specs import VLLM_VERSIONS, ProjectionRequest

PLAIN = build_layers(build_attention(0), build_attention(1))
MLA = build_layers(build_mla(0), build_mla(1))
HYBRID = build_layers(build_attention(0, heads=2, size=256), build_linear(1))


def meet(
    model: Layout,
    blocks: tuple[int, int],
    ranks: tuple[int, int] = (1, 1),
    version: str = "0.33",
    kernel: int | None = None,
) -> Handshake:
    prefill, decode = (
        ProjectionRequest(size, count, version) for size, count in zip(blocks, ranks, strict=True)
    )
    return check_handshake((model, model), (prefill, decode), kernel)


def list_codes(handshake: Handshake) -> list[str]:
    return [finding.code for finding in handshake.findings]


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_equal_workers_meet_without_a_word(version: str) -> None:
    for model in (PLAIN, MLA, HYBRID):
        assert meet(model, (64, 64), version=version) == Handshake(is_alike=True)


@pytest.mark.parametrize(("version", "count"), [("0.24", 2), ("0.33", 0)])
def test_what_a_side_cannot_register_is_a_finding_of_that_side(version: str, count: int) -> None:
    narrow = build_layers(build_attention(0, heads=2, size=128, size_v=64))
    findings = meet(narrow, (16, 16), version=version).findings
    assert [finding.code for finding in findings] == ["KV622"] * count
    assert [finding.message.split(":")[0] for finding in findings] == ["prefill", "decode"][:count]


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_workers_with_states_only_do_not_meet(version: str) -> None:
    states = build_layers(build_linear(0), build_linear(1))
    findings = meet(states, (16, 16), version=version).findings
    assert [finding.code for finding in findings] == ["KV622"] * 2
    assert all("StopIteration" in finding.message for finding in findings)


def test_pages_with_padding_in_kernel_blocks_are_not_known() -> None:
    padded = build_layers(
        *(build_attention(n, size=96) for n in (0, 2)),
        *(build_sliding(n, heads=5, window=128) for n in (1, 3)),
    )
    assert list_codes(meet(padded, (32, 32))) == ["KV622", "KV622"]
    divided = meet(padded, (32, 32), kernel=16)
    assert (divided.findings, len(divided.unknown)) == ((), 1)


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_blocks_of_decode_are_a_multiple_of_prefills(version: str) -> None:
    assert not meet(MLA, (16, 64), version=version).findings
    (finding,) = meet(PLAIN, (64, 16), version=version).findings
    assert (finding.code, finding.message) == (
        "KV622",
        f"blocks of 64 tokens in prefill and 16 in decode: vLLM {version} requires decode's to be "
        "a multiple of prefill's",
    )


def test_decode_fails_in_0_24_when_it_has_read_smaller_blocks_of_keys_and_values() -> None:
    (finding,) = meet(PLAIN, (16, 64), version="0.24").findings
    assert "decode fails when it has read them" in finding.message
    assert not meet(PLAIN, (16, 64)).findings


def test_blocks_of_windows_are_equal_in_0_24() -> None:
    (finding,) = meet(build_gpt_oss(), (16, 64), version="0.24").findings
    assert "unless all layers are full attention" in finding.message
    assert not meet(build_gpt_oss(), (16, 64)).findings


def test_more_ranks_in_prefill_want_equal_blocks_unless_mla() -> None:
    for version in VLLM_VERSIONS:
        (finding,) = meet(PLAIN, (16, 32), (4, 2), version).findings
        assert "requires equal blocks where prefill has more ranks" in finding.message
    assert not meet(PLAIN, (16, 16), (4, 2)).findings
    assert not meet(MLA, (16, 32), (4, 2)).findings


def test_prefill_does_not_replicate_heads_that_fewer_ranks_read() -> None:
    (finding,) = meet(PLAIN, (16, 16), (16, 8)).findings
    assert finding.code == "KV619"
    assert finding.message.startswith("16 ranks of prefill hold copies of 8 KV heads")
    assert not meet(PLAIN, (16, 16), (16, 16)).findings
    assert not meet(PLAIN, (16, 16), (8, 16)).findings


def test_tensor_parallelism_changes_the_blocks_of_a_hybrid() -> None:
    # Two ranks share both heads and states; on four, a head is replicated and states are not.
    assert not meet(HYBRID, (16, 16), (1, 2), "0.24").findings
    (finding,) = meet(HYBRID, (16, 16), (2, 4), "0.24").findings
    assert "equal ones" in finding.message or "multiple" in finding.message


def test_different_ranks_need_the_heads_apart() -> None:
    notes = meet(PLAIN, (16, 16), (1, 2), "0.24").notes
    assert notes == ("vLLM 0.24, NIXL: both sides need a layout with the heads apart: HND",)
    assert not meet(MLA, (16, 16), (1, 2), "0.24").notes


def test_layers_that_differ_in_their_heads_are_not_known() -> None:
    uneven = build_layers(build_attention(0), build_attention(1, heads=2))
    assert meet(uneven, (16, 16), (1, 2)).unknown == ("layers that differ in their KV heads",)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ((1, 1), "decode fails when it has read them"),
        ((2, 1), "requires equal blocks where prefill has more ranks"),
        ((1, 2), None),
    ],
)
def test_other_blocks_without_the_hybrid_manager_in_0_24(
    ranks: tuple[int, int], reason: str | None
) -> None:
    uneven = build_layers(build_attention(0, size=64), build_attention(1, heads=4, size=128))
    requests = (ProjectionRequest(16, ranks[0], "0.24"), ProjectionRequest(32, ranks[1], "0.24"))
    handshake = check_handshake((uneven, uneven), requests, has_hybrid_manager=False)
    if reason is None:
        assert handshake.findings == ()
        assert handshake.unknown
    else:
        assert [reason in finding.message for finding in handshake.findings] == [True]


def test_a_side_that_vllm_refuses_is_named() -> None:
    model = build_layers(build_attention(0, dtype="MXINT8"))
    findings = meet(model, (16, 16)).findings
    assert [finding.message.partition(":")[0] for finding in findings] == ["prefill", "decode"]


def test_kernel_blocks_count_where_backends_divide_blocks() -> None:
    assert not meet(PLAIN, (64, 16), kernel=16).findings
    # The two blocks of the hybrid differ, but both are made of 16 tokens.
    handshake = meet(HYBRID, (16, 16), (2, 4), "0.24", kernel=16)
    assert handshake.findings == ()
    assert any("prefix caching must be off" in note for note in handshake.notes)
    with pytest.raises(KvRenameError, match="a kernel's block of 24 tokens does not divide vLLM's"):
        meet(PLAIN, (64, 16), kernel=24)


def test_the_shortest_prompt_that_decode_does_not_get_is_a_finding() -> None:
    # Blocks of 128 are made of two kernel blocks, and vLLM reads the last one for a short prompt.
    handshake = meet(PLAIN, (128, 64), kernel=64)
    assert handshake.findings == ()
    (finding,) = handshake.read_findings
    assert (finding.code, finding.message.partition(":")[0]) == ("KV629", "prompt of 1 token")
    assert finding.hint == "choose the same ranks and blocks for both sides"
    assert meet(PLAIN, (64, 64), kernel=64).read_findings == ()
    chunked = build_layers(
        build_attention(0, kind="chunked_local_attention", window=64), build_attention(1)
    )
    (finding,) = meet(chunked, (16, 16)).read_findings
    assert (finding.message.partition(":")[0], finding.hint) == (
        "prompt of 64 tokens",
        "choose another connector than NIXL",
    )


def test_beside_states_decode_may_read_larger_blocks_of_one_slice() -> None:
    model = build_layers(
        build_attention(0, heads=2, size=256), build_linear(1, (512, 3), (8, 64, 64))
    )
    # Two ranks of prefill have a head each, and one rank of decode reads both.
    (finding,) = meet(model, (48, 96), (2, 1)).findings
    assert "requires equal blocks where prefill has more ranks" in finding.message
    # Four have two heads twice, and each of two ranks reads one.
    assert not meet(model, (48, 96), (4, 2)).findings


@pytest.mark.parametrize(
    ("blocks", "version", "codes"),
    [
        ((384, 256), "0.33", []),
        ((384, 256), "0.24", ["KV622"]),
        ((129 * 128, 128 * 128), "0.33", ["KV622"]),  # 129 pieces
    ],
)
def test_blocks_of_mla_beside_states_are_split_into_pieces(
    blocks: tuple[int, int], version: str, codes: list[str]
) -> None:
    model = build_layers(build_mla(0), build_linear(1, (1536, 3), (8, 64, 128)))
    handshake = meet(model, blocks, version=version)
    assert list_codes(handshake) == codes
    assert any("in pieces" in note for note in handshake.notes) is (codes == [])
