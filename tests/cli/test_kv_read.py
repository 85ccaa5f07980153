"""The share of the KV cache that was read, from a server's /metrics."""

from vllm_hybrid_sparse.cli.kv_read import share_of_kv_read

TEXT = """# TYPE vllm_hybrid_sparse_context_bytes_total counter
vllm_hybrid_sparse_context_bytes_total{engine="0",model_name="a b"} 3.0e+09
vllm_hybrid_sparse_context_bytes_total{engine="1",model_name="a b"} 1.0e+09
vllm_hybrid_sparse_context_bytes_created{engine="0",model_name="a b"} 1.7e+09
vllm_hybrid_sparse_read_bytes_total{engine="0",model_name="a b"} 4.0e+08
vllm_hybrid_sparse_read_bytes_total{engine="1",model_name="a b"} 1.0e+08
vllm_hybrid_sparse_summary_read_bytes_total{engine="0",model_name="a b"} 7.0
"""


def test_bytes_of_all_engines_are_added_up() -> None:
    assert share_of_kv_read(TEXT) == 0.125


def test_a_server_without_the_backend_or_without_decoding_gives_no_share() -> None:
    assert share_of_kv_read("vllm:num_requests_running 1.0\n") is None
    idle = (
        'vllm_hybrid_sparse_context_bytes_total{engine="0"} 0.0\nvllm_hybrid_sparse_read_bytes_total{engine="0"} 0.0\n'
    )
    assert share_of_kv_read(idle) is None
