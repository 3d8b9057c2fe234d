"""The generated code is what the .proto says, and no number of it has ever had another meaning."""

from pathlib import Path

from grpc_tools import protoc

from cluster.protocol import outrider_v1_pb2 as v1

ROOT = Path(__file__).parents[2]
PROTO = "cluster/protocol/outrider_v1.proto"
REGENERATE = f"python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. {PROTO}"


def test_the_committed_code_is_generated_from_the_proto(tmp_path: Path) -> None:
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    assert protoc.main(["protoc", f"-I{ROOT}", *out, str(ROOT / PROTO)]) == 0
    made = sorted(path for path in (tmp_path / PROTO).parent.iterdir())
    assert [path.name for path in made] == ["outrider_v1_pb2.py", "outrider_v1_pb2.pyi", "outrider_v1_pb2_grpc.py"]
    for path in made:
        assert path.read_text() == (ROOT / PROTO).with_name(path.name).read_text(), REGENERATE


def test_every_message_of_a_request_keeps_its_names_and_numbers() -> None:
    """Clients are compiled against these: a line may be added here, none may change."""
    assert {
        name: {field.name: field.number for field in v1.DESCRIPTOR.message_types_by_name[name].fields}
        for name in ("GenerateRequest", "Speculation", "GenerateResponse", "GenerateChunk", "GenerateComplete")
    } == {
        "GenerateRequest": {
            "request_id": 1,
            "tokenized": 2,
            "text": 3,
            "chat": 4,
            "sampling_params": 5,
            "speculation": 6,
            "model": 7,
        },
        "Speculation": {"enabled": 1, "max_depth": 2, "drafter": 3, "acceptance": 4},
        "GenerateResponse": {"request_id": 1, "chunk": 2, "complete": 3},
        "GenerateChunk": {"index": 1, "text": 2, "token_ids": 3, "logprobs": 4},
        "GenerateComplete": {
            "index": 1,
            "finish_reason": 2,
            "matched_token_id": 3,
            "matched_stop_str": 4,
            "usage": 5,
            "speculative": 6,
            "prompt_logprobs": 7,
        },
    }
