"""`judge`: what is refused, what is never accepted, and what a verdict must not depend on."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acceptance.support import INF, devices, make_evidence, make_head, map_evidence, needs_cuda, to_device
from dropmatch.acceptance import Evidence, Verdict, judge, reason_name
from dropmatch.config import AcceptanceConfig
from dropmatch.errors import SettingError
from dropmatch.heads import build

RULES = ["js", "naive", "strict"]
SUPPORTS = ["full", "shortlist"]
# p = 0.5 and weights that are multiples of 1/8: every logit is exact, so no batch rounds it differently
EXACT = AcceptanceConfig(verdict="sampled", dropout=0.5, shortlist_size=64)
HEAD = make_head(500, 32, scale=0.4)
EVIDENCE = make_evidence(HEAD, 40)


def config_for(rule: str, support: str = "full") -> AcceptanceConfig:
    return replace(EXACT, rule=rule, support=support)


def assert_same(made: Verdict, expected: Verdict) -> None:
    for field in fields(Verdict):
        a, b = getattr(made, field.name).cpu(), getattr(expected, field.name).cpu()
        assert a.dtype == b.dtype, field.name
        if a.dtype.is_floating_point:
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5, err_msg=field.name)
        else:
            assert torch.equal(a, b), field.name


def rows_of(verdict: Verdict, index: torch.Tensor) -> Verdict:
    return Verdict(**{field.name: getattr(verdict, field.name)[index] for field in fields(Verdict)})


# --- nothing but the row itself matters


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_the_rows_here_are_worth_comparing(rule: str, support: str) -> None:
    verdict = judge(EVIDENCE, config_for(rule, support), HEAD)
    assert 3 < int(verdict.accept.sum()) < 37
    if rule == "js":  # and none is so close to equality in equation 6 that rounding decides
        assert (verdict.distance - verdict.radius).abs().min().item() > 1e-5


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_row_order_and_batch_composition_do_not_matter(rule: str, support: str, data: st.DataObject) -> None:
    config = config_for(rule, support)
    index = torch.tensor(data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=50)))
    assert_same(judge(EVIDENCE.rows(index), config, HEAD), rows_of(judge(EVIDENCE, config, HEAD), index))


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", ["js", "naive"])
def test_chunk_size_does_not_matter(rule: str, support: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(rule, support)
    expected = judge(EVIDENCE, config, HEAD)
    one_row = 500 * config.heads * build.BYTES_PER_LOGIT
    sizes = set()
    for limit in (1, 3 * one_row, 17 * one_row, 1 << 40):
        monkeypatch.setattr(build, "CHUNK_BYTES", limit)
        HEAD.calls.clear()
        assert_same(judge(EVIDENCE, config, HEAD), expected)
        assert sum(shape[0] for _, shape in HEAD.calls) == (200 if support == "full" else 40)
        sizes.add(len(HEAD.calls))
    assert {40, 1} < sizes  # row by row, all at once, and something between


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("field", ["bias", "allowed"])
def test_optional_evidence_is_chunked_with_its_rows(support: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    bias = torch.where(torch.rand(40, 500, generator=generator) < 0.3, -INF, 0.0)
    bias.scatter_(1, EVIDENCE.draft_tokens[:, None], 0.0)
    allowed = torch.rand(40, generator=generator) < 0.5
    evidence = replace(EVIDENCE, **{field: bias if field == "bias" else allowed})
    expected = judge(evidence, config_for("js", support), HEAD)
    monkeypatch.setattr(build, "CHUNK_BYTES", 1)
    assert_same(judge(evidence, config_for("js", support), HEAD), expected)
    assert not torch.equal(expected.accept, judge(EVIDENCE, config_for("js", support), HEAD).accept)


@pytest.mark.parametrize("support", SUPPORTS)
def test_seed_and_position_matter_and_mask_seed_overrides(support: str) -> None:
    config = config_for("js", support)
    base = judge(EVIDENCE, config, HEAD)
    for change in ({"seeds": EVIDENCE.seeds + 1}, {"positions": EVIDENCE.positions + 1}):
        other = judge(replace(EVIDENCE, **change), config, HEAD)
        assert not torch.allclose(other.radius, base.radius)
        np.testing.assert_array_equal(other.accept.shape, base.accept.shape)
    fixed = replace(config, mask_seed=9)
    assert_same(judge(replace(EVIDENCE, seeds=EVIDENCE.seeds * 7), fixed, HEAD), judge(EVIDENCE, fixed, HEAD))


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_evidence_is_left_as_it_was(rule: str, support: str) -> None:
    bias = torch.zeros(40, 500)
    bias[:, ::7] = -INF
    tokens = EVIDENCE.draft_tokens.clone()
    tokens[::5] = -1
    evidence = replace(EVIDENCE, bias=bias, draft_tokens=tokens)
    copy = map_evidence(evidence, torch.clone)
    judge(evidence, config_for(rule, support), HEAD)
    for name, value in vars(copy).items():
        if value is not None:
            assert torch.equal(getattr(evidence, name), value), name


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_does_not_matter(support: str, dtype: torch.dtype) -> None:
    """Engines set it while they load a model, users leave it set."""
    expected = {rule: judge(EVIDENCE, config_for(rule, support), HEAD) for rule in RULES}
    torch.set_default_dtype(dtype)
    try:
        made = {rule: judge(EVIDENCE, config_for(rule, support), HEAD) for rule in RULES}
    finally:
        torch.set_default_dtype(torch.float32)
    for rule in RULES:
        assert_same(made[rule], expected[rule])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("support", SUPPORTS)
def test_half_precision_models_are_judged_in_fp32(support: str, dtype: torch.dtype) -> None:
    head = make_head(500, 32, scale=0.4)
    head.weight = head.weight.to(dtype)
    evidence = replace(EVIDENCE, hidden=EVIDENCE.hidden.to(dtype), clean_logits=head.full(EVIDENCE.hidden.to(dtype)))
    made, expected = judge(evidence, config_for("js", support), head), judge(EVIDENCE, config_for("js", support), HEAD)
    for name in ("distance", "radius", "probability"):
        assert getattr(made, name).dtype == torch.float32
        np.testing.assert_allclose(getattr(made, name), getattr(expected, name), atol=0.02, err_msg=name)
    assert (made.accept == expected.accept).float().mean().item() >= 0.9


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_verdict_holds_no_graph(support: str) -> None:
    """A head with trainable weights: a graph would keep every chunk's logits alive."""
    head = make_head(500, 32, scale=0.4)
    head.weight.requires_grad_(True)
    verdict = judge(EVIDENCE, config_for("js", support), head)
    assert not verdict.distance.requires_grad
    assert not verdict.radius.requires_grad
    assert not verdict.probability.requires_grad


@needs_cuda
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_cuda_and_cpu_agree(rule: str, support: str) -> None:
    head = make_head(500, 32, scale=0.4)
    head.weight = head.weight.cuda()
    made = judge(to_device(EVIDENCE, "cuda"), config_for(rule, support), head)
    expected = judge(EVIDENCE, config_for(rule, support), HEAD)
    assert made.accept.is_cuda
    assert torch.equal(made.accept.cpu(), expected.accept)
    np.testing.assert_allclose(made.radius.cpu(), expected.radius, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("support", SUPPORTS)
def test_no_host_synchronisation_on_a_gpu(support: str) -> None:
    head = make_head(500, 32, scale=0.4)
    head.weight = head.weight.cuda()
    # the head of these tests looks at its ids, which synchronises; a plain one does not
    head.gather = lambda hidden, ids: torch.einsum("nkd,nsd->nks", hidden, head.weight[ids])  # type: ignore[method-assign]
    evidence = to_device(EVIDENCE, "cuda")
    judge(evidence, config_for("js", support), head)
    torch.cuda.set_sync_debug_mode("error")
    try:
        judge(evidence, config_for("js", support), head)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- what is never accepted


@devices
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_placeholders_and_unknown_tokens_are_never_accepted(rule: str, support: str, device: str) -> None:
    head = make_head(500, 32, scale=0.4)
    head.weight = head.weight.to(device)
    bad = [-1, 500, 501, 10**6, -(2**40), 2**40, 499, 0]
    evidence = EVIDENCE.rows(slice(0, len(bad)))
    # drafts at the centre of the cluster, so that nothing but the token speaks against them
    evidence = replace(
        evidence, draft_logits=evidence.clean_logits, draft_tokens=torch.tensor(bad), clean_tokens=torch.tensor(bad)
    )
    verdict = judge(to_device(evidence, device), config_for(rule, support), head)
    assert not bool(verdict.accept[:6].any())
    assert [reason_name(code) for code in verdict.reason[:6].tolist()] == ["rejected"] * 6
    if rule != "naive":
        assert bool(verdict.accept[6:].all())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_placeholders_do_not_change_the_other_rows(rule: str, support: str) -> None:
    config = config_for(rule, support)
    tokens = EVIDENCE.draft_tokens.clone()
    tokens[::3] = -1
    rest = torch.arange(40) % 3 != 0
    made = judge(replace(EVIDENCE, draft_tokens=tokens), config, HEAD)
    assert_same(rows_of(made, rest), rows_of(judge(EVIDENCE, config, HEAD), rest))


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(400, 360), (360, 400)])
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", ["js", "naive"])
def test_a_padded_id_is_never_accepted(rule: str, support: str, target_vocab: int, draft_vocab: int) -> None:
    head = make_head(target_vocab, 32)
    evidence = make_evidence(head, 4, draft_vocab=draft_vocab)
    padded = torch.tensor([360, 399, 359, 0])
    draft = torch.full((4, draft_vocab), -20.0)
    draft[:, :360] = evidence.clean_logits[:, :360]
    verdict = judge(replace(evidence, draft_tokens=padded, draft_logits=draft), config_for(rule, support), head)
    assert verdict.accept[:2].tolist() == [False, False]
    if rule == "js":
        assert verdict.accept[2:].tolist() == [True, True]


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_allowed_vetoes_and_changes_nothing_else(rule: str, support: str) -> None:
    config = config_for(rule, support)
    free = judge(EVIDENCE, config, HEAD)
    allowed = torch.arange(40) % 2 == 0
    assert bool(free.accept[~allowed].any())
    made = judge(replace(EVIDENCE, allowed=allowed), config, HEAD)
    assert_same(made, free.only(allowed))
    assert not bool(made.accept[~allowed].any())
    assert bool((made.reason[~allowed] == 0).all())
    assert_same(judge(replace(EVIDENCE, allowed=torch.ones(40, dtype=torch.bool)), config, HEAD), free)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_banned_draft_token_is_never_accepted(rule: str, support: str) -> None:
    """Case 5: under any rule, and without `allowed` saying it once more."""
    bias = torch.zeros(40, 500).scatter(1, EVIDENCE.draft_tokens[:, None], -INF)
    clean = (EVIDENCE.clean_logits + bias).argmax(dim=1)
    evidence = replace(EVIDENCE, bias=bias, clean_tokens=clean, draft_logits=EVIDENCE.clean_logits)
    verdict = judge(evidence, config_for(rule, support), HEAD)
    assert not bool(verdict.accept.any())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", ["js", "naive"])
def test_a_grammar_that_leaves_nothing_accepts_nothing(rule: str, support: str) -> None:
    evidence = replace(EVIDENCE, bias=torch.full((40, 500), -INF), draft_tokens=torch.arange(40))
    assert not bool(judge(evidence, config_for(rule, support), HEAD).accept.any())


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_draft_without_mass_on_anything_allowed_falls_back_to_the_majority(support: str) -> None:
    """The grammar leaves two tokens, and the drafter gives both a probability of 0."""
    bias = torch.full((40, 500), -INF)
    bias[:, 10:12] = 0.0
    draft = EVIDENCE.draft_logits.clone()  # type: ignore[union-attr]
    draft[:, 10:12] = -INF
    evidence = replace(EVIDENCE, bias=bias, draft_logits=draft, draft_tokens=torch.tensor([10, 11] * 20))
    verdict = judge(evidence, config_for("js", support), HEAD)
    assert {reason_name(code) for code in verdict.reason.tolist()} == {"majority", "rejected"}
    assert bool((verdict.accept == (verdict.votes >= 3)).all())


# --- what is refused


def test_js_without_a_draft_distribution_is_refused_and_naive_works() -> None:
    evidence = replace(EVIDENCE, draft_logits=None)
    with pytest.raises(SettingError, match=r"'js'.*this drafter has none.*'naive' or 'strict'"):
        judge(evidence, config_for("js"), HEAD)
    for rule in ("naive", "strict"):
        made, expected = (judge(e, config_for(rule), HEAD) for e in (evidence, EVIDENCE))
        assert torch.equal(made.accept, expected.accept)
    # the shortlist is shorter without the draft's likeliest tokens: a head may now choose another one
    short = judge(evidence, config_for("naive", "shortlist"), HEAD)
    full = judge(EVIDENCE, config_for("naive"), HEAD)
    assert int((short.accept == full.accept).sum()) >= 36


@pytest.mark.parametrize("rule", ["js", "naive"])
def test_rules_with_heads_need_a_head(rule: str) -> None:
    with pytest.raises(SettingError, match=f"'{rule}' needs the target's LM head"):
        judge(EVIDENCE, config_for(rule))
    judge(EVIDENCE, config_for("strict"))


# --- no rows at all (case 27)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_zero_rows(rule: str, support: str) -> None:
    HEAD.calls.clear()
    for evidence in (EVIDENCE.rows(slice(0, 0)), EVIDENCE.rows(torch.zeros(40, dtype=torch.bool))):
        assert len(evidence) == 0
        verdict = judge(evidence, config_for(rule, support), HEAD)
        whole = judge(EVIDENCE, config_for(rule, support), HEAD)
        for field in fields(Verdict):
            value = getattr(verdict, field.name)
            assert value.shape == (0,)
            assert value.dtype == getattr(whole, field.name).dtype, field.name
    bare = replace(EVIDENCE.rows(slice(0, 0)), bias=torch.zeros(0, 500), allowed=torch.zeros(0, dtype=torch.bool))
    assert judge(bare, config_for(rule, support), HEAD).accept.shape == (0,)


def test_rows_takes_every_kind_of_index() -> None:
    evidence = replace(EVIDENCE, bias=torch.arange(40.0)[:, None].expand(40, 500))
    boolean = torch.arange(40) % 4 == 1
    for index in (boolean, boolean.nonzero().squeeze(1), slice(1, None, 4)):
        part = evidence.rows(index)
        assert isinstance(part, Evidence)
        assert torch.equal(part.positions, evidence.positions[1::4])
        assert part.bias is not None
        assert part.bias[:, 0].tolist() == list(range(1, 40, 4))
        assert part.allowed is None
