import copy
import json

import chat_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.text.template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Weather & <wind> "here" in °C',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TALK = [
    {"role": "user", "content": "Hi <b>there</b> & 'you' 😀"},
    {"role": "assistant", "content": "  Hello.\n<think>so</think>\n\nYes\n"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TALK]
CALL = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"c": 21}'},
]


@pytest.fixture(scope="module")
def oracle():
    """transformers' own rendering of a template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "<unk>": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)

    def render(source, messages, **options):
        return tokenizer.apply_chat_template(
            copy.deepcopy(messages), chat_template=source, tokenize=False, **{"add_generation_prompt": True} | options
        )

    return render


def attempt(render):
    try:
        return render(), None
    except Exception as error:
        return None, error


@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"enable_thinking": False}]
)
@pytest.mark.parametrize("messages", [TALK, SYSTEM, CALL, TALK[:1]], ids=["talk", "system", "call", "one"])
@pytest.mark.parametrize("name", chat_templates.BY_NAME)
def test_renders_as_transformers_does(oracle, name, messages, options):
    source = chat_templates.BY_NAME[name]
    ours = ChatTemplate(source, SPECIALS)
    expected, refusal = attempt(lambda: oracle(source, messages, **options))
    text, ours_refusal = attempt(lambda: ours.render(messages, **options))
    assert text == expected
    assert (refusal is None) == (ours_refusal is None)
    if refusal is not None:
        assert isinstance(ours_refusal, InvalidInput)
        assert str(refusal) in ours_refusal.message


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=30)), min_size=1, max_size=5)
)
def test_random_messages_render_as_in_transformers(oracle, messages):
    talk = [{"role": role, "content": content} for role, content in messages]
    for name in ("chatml", "llama3", "qwen"):
        source = chat_templates.BY_NAME[name]
        assert ChatTemplate(source, SPECIALS).render(talk) == oracle(source, talk)


@pytest.mark.model
def test_the_real_model_template(smollm_metadata, smollm, smollm_oracle):
    ours = ChatTemplate.from_gguf(smollm_metadata, smollm.special_tokens)
    for messages in (TALK, SYSTEM):
        for prompt in (True, False):
            text = ours.render(messages, add_generation_prompt=prompt)
            assert text == smollm_oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            ids = smollm_oracle.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert smollm.encode(text, add_special=False) == ids


def test_the_template_refusal_reaches_the_caller_in_its_own_words():
    ours = ChatTemplate(chat_templates.STRICT, SPECIALS)
    with pytest.raises(InvalidInput) as error:
        ours.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert error.value.field == "messages"
    assert error.value.message.startswith("After the optional system message, conversation roles must alternate")
    with pytest.raises(InvalidInput, match="System role not supported"):
        ChatTemplate(chat_templates.GEMMA, SPECIALS).render(SYSTEM)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]}]


def test_all_text_parts_are_kept_in_order():
    assert "first\nsecond" in ChatTemplate(chat_templates.CHATML).render(PARTS)
    assert "user\nfirstsecond<end_of_turn>" in ChatTemplate(chat_templates.GEMMA, SPECIALS).render(PARTS)
    assert ChatTemplate(chat_templates.PARTS_ONLY).render(PARTS) == "USER:<first><second>"
    assert ChatTemplate(chat_templates.PARTS_ONLY).render(TALK[:1]) == f"USER:<{TALK[0]['content']}>"


def test_a_macro_that_goes_through_parts_gets_them():
    source = (
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for item in content %}[{{ item.text }}]{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    )
    assert ChatTemplate(source).render(PARTS) == "[first][second]"
    assert ChatTemplate(source).render(TALK[:1]) == TALK[0]["content"]


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "image_url",
        ),
        ([*TALK, {"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[3].content[0].text", "string"),
        ([{"role": "user", "content": 7}], "messages[0].content", "string or a list"),
        ([{"content": "x"}], "messages[0].role", "string"),
        (["hi"], "messages[0]", "object"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, field, words):
    with pytest.raises(InvalidInput, match=words) as error:
        ChatTemplate(chat_templates.CHATML).render(messages)
    assert error.value.field == field


def test_content_of_null_and_arguments_as_text(oracle):
    called = copy.deepcopy(CALL)
    called[1]["content"] = None
    called[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Köln"})
    for source in (chat_templates.QWEN_TOOLS, chat_templates.LLAMA3):
        assert ChatTemplate(source, SPECIALS).render(called) == oracle(source, CALL)
    called[1]["tool_calls"][0]["function"]["arguments"] = "not json"
    assert '"arguments": "not json"' in ChatTemplate(chat_templates.QWEN_TOOLS, SPECIALS).render(called)


def test_messages_are_left_as_they_were():
    messages = copy.deepcopy(CALL)
    ChatTemplate(chat_templates.QWEN_TOOLS, SPECIALS).render(messages, tools=TOOLS)
    assert messages == CALL


HOSTILE = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for a in [1]*9 recursive %}{% if loop.depth < 60 %}{{ loop([1]*9) }}{% endif %}{% endfor %}",
    "huge output": "{% for i in range(90000) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "multiply": "{{ 'a' * 10**12 }}",
    "multiply list": "{{ 10**11 * [1] }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "add": "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "concatenate": "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "block": "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"
    "{% endfor %}",
    "macro": "{% set n = namespace(s='aaaa') %}{% macro d() %}{{ n.s }}{{ n.s }}{% endmacro %}"
    "{% for i in range(99) %}{% set n.s = d() %}{% endfor %}",
    "replace": "{% set n = namespace(s='aaaa') %}{% for i in range(9) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
    "replace filter": "{% set n = namespace(s='aa') %}{% for i in range(9) %}{% set n.s = n.s|replace('a', n.s) %}"
    "{% endfor %}",
    "join": "{{ (['a' * 9999] * 9999) | join }}",
    "join method": "{{ ('a' * 9999).join(['b'] * 9999) }}",
    "joined attribute": "{{ ([{'a': 'x' * 99999}] * 99999) | join(attribute='a') }}",
    "many": "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + ['a' * 900000] %}{% endfor %}",
    "width": "{{ '%99999999d' % 1 }}",
    "starred width": "{{ '%*d' % (99999999, 1) }}",
    "format filter": "{{ '%99999999d' | format(1) }}",
    "format method": "{{ '{:99999999}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 99999999) }}",
    "pad": "{{ 'a'.ljust(10**11) }}",
    "indent": "{{ '\n\n\n' | indent('a' * 900000) }}",
    "json indent": "{{ [1] | tojson(indent=99999999) }}",
    "internals": "{{ cycler.__init__.__globals__ }}",
    "internals by filter": "{{ (messages|attr('__class__')).mro() }}",
    "namespace internals": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "change": "{{ messages.append(1) }}",
    "format internals": "{{ '{0.__class__.__mro__}'.format(1) }}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_stopped(kind):
    with pytest.raises((UnsupportedModel, InvalidInput)) as error:
        ChatTemplate(HOSTILE[kind]).render(TALK)
    assert error.value.field in ("chat_template", "messages")


def test_bounds_follow_the_size_of_the_input():
    long = [{"role": "user", "content": "word " * 1_000_000}]
    assert len(ChatTemplate(chat_templates.CHATML).render(long)) > 5_000_000
    many = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(5001)]
    assert ChatTemplate(chat_templates.STRICT, SPECIALS).render(many).count("[INST]") == 2501


def test_loop_variables_survive_the_bounds(oracle):
    source = (
        "{% for m in messages %}{% for c in m.role if c != 'e' %}{{ loop.index }}/{{ loop.length }}{{ c }}"
        "{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{% else %}-{% endfor %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
        "{{ messages | map(attribute='role') | join(', ') }} {{ 'a-b' | replace('-', '+') }} {{ '%s=%d' % ('a', 3) }}"
        "{{ '{}:{}'.format('x', 1) }} {{ 'l1\nl2' | indent(2, true) }} {{ ', '.join(['p', 'q']) }} {{ 'a' ~ 1 ~ none }}"
        "{{ messages | tojson(indent=2, sort_keys=true) }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ dict(a=1) }} {{ 7 % 4 }}"
    )
    assert ChatTemplate(source).render(TALK) == oracle(source, TALK)


def test_errors_inside_a_template_are_the_input_at_fault():
    with pytest.raises(InvalidInput, match="cannot render these messages") as error:
        ChatTemplate("{{ messages[0].nothing.more }}").render(TALK)
    assert error.value.field == "messages"


def test_a_template_that_does_not_compile():
    with pytest.raises(UnsupportedModel, match=r"line 2") as error:
        ChatTemplate("a\n{% nonsense %}").compile()
    assert error.value.field == "chat_template"


def test_no_template_says_what_to_do():
    ours = ChatTemplate({})
    assert not ours
    with pytest.raises(UnsupportedModel, match="no chat template") as error:
        ours.render(TALK)
    assert "--chat-template" in str(error.value.remedy)


def test_named_templates(tmp_path):
    named = ChatTemplate({"default": "d", "tool_use": "t"})
    assert (named.render(TALK), named.render(TALK, tools=TOOLS)) == ("d", "t")
    with pytest.raises(UnsupportedModel, match="rag, x"):
        ChatTemplate({"rag": "r", "x": "x"}).render(TALK)
    gguf = ChatTemplate.from_gguf({"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"})
    assert gguf.sources == named.sources


def test_sources_in_a_folder(tmp_path):
    assert not ChatTemplate.from_folder(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert ChatTemplate.from_folder(tmp_path).sources == {"default": "one"}
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]})
    )
    assert ChatTemplate.from_folder(tmp_path).sources == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}x")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    found = ChatTemplate.from_folder(tmp_path, SPECIALS)
    assert (found.render(TALK), found.render(TALK, tools=TOOLS)) == ("<s>x", "t")
