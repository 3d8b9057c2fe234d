from router.depth_probe import FIRST_SPAN, LONGEST_SPAN, Probe, after_probe, places


def test_probes_become_rare_while_they_show_nothing_new() -> None:
    state, batches = Probe(), []
    for batch in range(1, 4 * LONGEST_SPAN + 1):
        if state.due(batch):
            batches.append(batch)
            state = after_probe(state, batch, expected=0.1, accepted=False)
    assert batches[:3] == [FIRST_SPAN, 2 * FIRST_SPAN, 4 * FIRST_SPAN]
    assert state.span == LONGEST_SPAN
    assert len(batches) <= 10


def test_after_a_surprise_the_next_batch_probes_again() -> None:
    state = after_probe(Probe(64, 128), 128, expected=0.1, accepted=True)
    assert state.due(129)


def test_what_was_expected_is_no_surprise() -> None:
    assert after_probe(Probe(8, 8), 8, expected=0.9, accepted=True).span == 16


def test_sessions_of_one_verifier_probe_in_the_same_batches() -> None:
    young, old = Probe(FIRST_SPAN), Probe(LONGEST_SPAN)
    assert all(young.due(batch) for batch in range(1024) if old.due(batch))


def test_few_of_many_sessions_probe_at_a_time() -> None:
    assert [places(n) for n in (1, 3, 4, 16)] == [1, 1, 1, 4]
