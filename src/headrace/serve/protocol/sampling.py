"""Fields that completions and chat completions share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headrace.serve.protocol.strict import StrictModel

TokenId = Annotated[int, Field(ge=0, lt=2**31, description="A token id of the model's vocabulary.")]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
LogitBias = Annotated[float, Field(ge=-100, le=100)]
JsonObject = dict[str, Any]

OTHER_SERVERS = {
    "guided_json": "use structured_outputs.json or response_format",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar, in Lark",
    "grammar": "use structured_outputs.grammar, in Lark",
    "json_schema": "use structured_outputs.json or response_format",
    "n_predict": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "use_beam_search": "there is no beam search here",
}
"""Names that other servers have for what is here, or for what is not."""

MAX_STOPS = 16
MAX_LOGPROBS = 20


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End the stream with one chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="Also say in each chunk how many tokens its choice has so far; needs include_usage."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted without effect: chunks are never padded.")


class StructuredOutputs(StrictModel):
    """Exactly one rule that the whole output follows (beyond OpenAI)."""

    json_schema: JsonObject | None = Field(None, alias="json", description="A JSON schema.")
    regex: Annotated[str, Field(min_length=1)] | None = Field(None, description="A regular expression (Rust syntax).")
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, description="The output is one of these.")
    grammar: Annotated[str, Field(min_length=1)] | None = Field(None, description="A Lark grammar with rule `start`.")


class SamplingFields(StrictModel):
    """How to sample. Unset fields take the model's `generation_config.json` values, else the defaults named here."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, ge=0, le=1, description="Default 1 (off).")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 are off. Default 0.")
    min_p: float | None = Field(None, ge=0, le=1, description="Default 0 (off).")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, description="Default 1 (off).")
    logit_bias: dict[str, LogitBias] | None = Field(None, description="Token id (as a string) to bias.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string that ends the text.")
    skip_special_tokens: bool | None = Field(None, description="False shows special tokens as text. Default true.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="No end before so many tokens. Default 0.")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    structured_outputs: StructuredOutputs | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower runs earlier. Default 0.")
    explain: bool | None = Field(None, description="Report where the request's time went.")
    user: str | None = Field(None, description="Accepted without effect.")
    metadata: JsonObject | None = Field(None, description="Accepted without effect.")
    store: bool | None = Field(None, description="Accepted without effect.")
    service_tier: str | None = Field(None, description="Accepted without effect.")
    safety_identifier: str | None = Field(None, description="Accepted without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted without effect.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
