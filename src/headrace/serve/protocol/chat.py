"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace.serve.protocol.sampling import MAX_LOGPROBS, OTHER_SERVERS, JsonObject, SamplingFields
from headrace.serve.protocol.strict import StrictModel

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(StrictModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(StrictModel):
    """An earlier refusal of the assistant, given back as history."""

    type: Literal["refusal"]
    refusal: str


AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[TextPart], Field(min_length=1)]
Content = str | Parts


class SystemMessage(StrictModel):
    role: Literal["system"]
    content: Content
    name: str | None = None


class DeveloperMessage(StrictModel):
    """Newer name of the system role; treated as one."""

    role: Literal["developer"]
    content: Content
    name: str | None = None


class UserMessage(StrictModel):
    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(StrictModel):
    """`arguments` is the text of a JSON object."""

    name: Name
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(None, description="As streamed deltas have it; without effect.")


class AssistantMessage(StrictModel):
    """An earlier answer, given back as history."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantPart], Field(min_length=1)] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="An empty list is none.")
    reasoning_content: str | None = Field(None, description="Goes to the chat template, which may show or drop it.")
    annotations: list[JsonObject] | None = Field(None, description="Accepted without effect.")
    audio: None = None
    function_call: None = None


class ToolMessage(StrictModel):
    """What a called tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = Field(None, description="Goes to the chat template.")


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(StrictModel):
    name: Name
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments; left out: no arguments.")
    strict: bool | None = Field(None, description="Without effect: arguments always follow the schema.")


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    name: Name


class NamedTool(StrictModel):
    """Call this function."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(StrictModel):
    name: Name
    description: str | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = Field(None, description="Without effect: the output always follows the schema.")


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields):
    """Answer a conversation."""

    UNSUPPORTED: ClassVar = OTHER_SERVERS | {
        "audio": "this model writes text",
        "modalities": "this model writes text",
        "prediction": "predicted outputs are not offered",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "web_search_options": "there is no web search here",
        "continue_final_message": "an answer begins anew; continue a text with /v1/completions",
        "echo": "an answer does not repeat the conversation",
        "reasoning_effort": "this model has no reasoning setting",
        "verbosity": "this model has no verbosity setting",
    }

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Default: what the context leaves; clamped to the same."
    )
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="Newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs.")
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(None, description="An empty list is none.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Default auto; without tools there are no calls."
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may hold several calls. Default true."
    )
