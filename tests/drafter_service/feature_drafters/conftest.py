import pytest

from tests.drafter_service.feature_drafters.recorded_rounds import Golden, Target

DSPARK = ["dspark_markov", "dspark_gated", "dspark_rnn"]
BLOCKS = [*DSPARK, "dflash", "dflash_zlab"]
CHAINS = ["eagle3", "eagle3_d2t"]


@pytest.fixture(scope="session")
def target() -> Target:
    return Target()


@pytest.fixture(params=DSPARK)
def dspark_golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture(params=BLOCKS)
def block_golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture(params=CHAINS)
def chain_golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture(params=[*BLOCKS, *CHAINS])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)
