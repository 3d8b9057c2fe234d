import pytest
import torch

from outrider_kernels.philox import MASK_32, key_words, philox, signed_key

# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK_32,) * 4, (MASK_32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_words_equal_the_published_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == expected


def test_a_batch_of_known_answers_gives_each_its_own_words():
    counter = tuple(torch.tensor([case[0][lane] for case in KNOWN_ANSWERS]) for lane in range(4))
    key = tuple(torch.tensor([case[1][lane] for case in KNOWN_ANSWERS]) for lane in range(2))
    words = torch.stack(philox(counter, key), dim=-1)
    assert words.tolist() == [list(case[2]) for case in KNOWN_ANSWERS]


def test_every_argument_may_be_the_one_that_broadcasts():
    scalars = [torch.tensor([[v]]) for v in (3, 5, 7, 11, 13, 17)]
    for wide in range(6):
        values = torch.tensor([[1, 2**31, MASK_32]]).T
        arguments = [*scalars[:wide], values, *scalars[wide + 1 :]]
        together = torch.stack(philox(tuple(arguments[:4]), tuple(arguments[4:])), dim=-1)
        for row, value in enumerate(values):
            alone = [*scalars[:wide], value, *scalars[wide + 1 :]]
            words = torch.stack(philox(tuple(alone[:4]), tuple(alone[4:])), dim=-1)
            assert torch.equal(together[row].flatten(), words.flatten())


def test_arguments_are_left_as_they_were():
    counter = tuple(torch.full((3,), v) for v in (1, 2, 3, 4))
    key = tuple(torch.full((3,), v) for v in (5, 6))
    philox(counter, key)
    assert [int(t[0]) for t in (*counter, *key)] == [1, 2, 3, 4, 5, 6]


def test_no_counters_give_no_words():
    empty = torch.empty(0, dtype=torch.int64)
    assert all(word.shape == (0,) for word in philox((empty,) * 4, (empty,) * 2))


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 + 7, 2**63, 2**64 - 1])
def test_all_64_bits_of_a_key_reach_its_two_words(key):
    low, high = key_words(torch.tensor([signed_key(key)]))
    assert (int(high) << 32) | int(low) == key
