import pytest
from scripted_engine import ScriptedEngine
from serve_harness import EOS, MODEL, Live, Served

from headrace.serve.config import ServeConfig
from headrace.spec.locate import locate
from headrace.text.load import load_template, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(locate("smollm2-135m"))


@pytest.fixture(scope="session")
def template(tokenizer):
    return load_template(locate("smollm2-135m"), tokenizer)


@pytest.fixture
async def live(tokenizer, template):
    """Like `serve`, behind a real socket: `await live(…)`."""
    started = []

    async def make(*, max_num_seqs=64, max_model_len=512, **config):
        engine = ScriptedEngine(tokenizer, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        settings = ServeConfig(served_names=(MODEL,), eos_token_ids=EOS, **config)
        started.append(Live(engine, tokenizer, template, settings))
        return await started[-1].start()

    yield make
    for server in started:
        server.engine.go.set()
        await server.stop()


@pytest.fixture
def serve(tokenizer, template):
    """Make a `Served`: `serve(max_num_seqs=…, api_keys=…)`, engine arguments and server configuration mixed."""

    def make(*, max_num_seqs=64, max_model_len=512, template=template, **config):
        engine = ScriptedEngine(tokenizer, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        settings = ServeConfig(served_names=(MODEL,), eos_token_ids=EOS, **config)
        return Served(engine, tokenizer, template, settings)

    return make


@pytest.fixture
def served(serve):
    return serve()
