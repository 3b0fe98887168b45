"""Chat templates: the same text as Hugging Face's own rendering, and nothing a template could break out of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gateway_stage import MODEL_FOLDER

from octavo_gateway.chat_template import ChatTemplate
from octavo_gateway.errors import ApiError
from octavo_gateway.model_assets import load_assets
from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.settings import GatewaySettings, SettingError, load_settings

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's <b>2 & 3</b>?\n"},
    {"role": "assistant", "content": "  Five. "},
    {"role": "user", "content": "漢字 🦙"},
]

# What templates in the field do: loop controls, macros, namespaces, tojson, dates, trimming, special tokens.
LLAMA_LIKE = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message['content'] | trim %}
        {%- continue %}
    {%- endif %}
    {{- '<|' ~ message.role ~ '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{{ eos_token }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
{%- endfor %}
{{- ns.system | tojson }}
{%- if documents %}{{ documents | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""

PARTS = """{% for message in messages %}{% set content = message['content'] %}
[{{ message['role'] }}]
{% for part in content %}
  {% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}
{% endfor %}
{% if loop.index > 10 %}{% break %}{% endif %}
{% endfor %}"""


@pytest.mark.parametrize("source", [LLAMA_LIKE, PARTS.replace("message['content']", "[{'type': 'text', 'text': 'x'}]")])
@pytest.mark.parametrize("opens", [False, True])
def test_rendering_equals_transformers(source: str, opens: bool) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    documents = [{"title": "ä<&>", "text": "x"}]
    [expected], _ = chat_template_utils.render_jinja_template(
        [CHAT], chat_template=source, documents=documents, add_generation_prompt=opens, **tokens
    )
    rendered = ChatTemplate(source, tokens).render(
        CHAT, add_generation_prompt=opens, continue_final_message=False, variables={"documents": documents}
    )
    assert rendered == expected


def test_the_default_model_renders_as_transformers_does(tokenizer: ModelTokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL_FOLDER)
    assets = load_assets(load_settings(GatewaySettings, model=str(MODEL_FOLDER)))
    assert assets.chat_template is not None
    for chat in (CHAT, CHAT[1:2]):
        ours = assets.chat_template.render(chat, add_generation_prompt=True, continue_final_message=False, variables={})
        assert ours == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode([ours], add_special_tokens=False)[0] == ids
    continued = assets.chat_template.render(
        CHAT[:3], add_generation_prompt=False, continue_final_message=True, variables={}
    )
    assert continued == theirs.apply_chat_template(CHAT[:3], tokenize=False, continue_final_message=True)


def test_templates_that_loop_over_content_get_parts() -> None:
    assert ChatTemplate(PARTS, {}).wants_parts
    assert not ChatTemplate(LLAMA_LIKE, {}).wants_parts


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
    ],
)
def test_templates_that_fail_are_the_requests_fault(source: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, {}).render(CHAT, add_generation_prompt=True, continue_final_message=False, variables={})
    assert caught.value.problem.status == 400
    assert words in caught.value.problem.message


def model_folder(path: Path, tokenizer_config: str = "{}", **files: str) -> Path:
    """A model's folder with the default model's tokenizer."""
    (path / "tokenizer.json").symlink_to(MODEL_FOLDER / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(tokenizer_config)
    for name, content in files.items():
        (path / f"{name}.json").write_text(content)
    return path


def assets_of(folder: Path, **flags: Any) -> Any:
    return load_assets(load_settings(GatewaySettings, model=str(folder), **flags))


@pytest.mark.usefixtures("tokenizer")
def test_where_templates_and_defaults_come_from(tmp_path: Path) -> None:
    config = '{"chat_template": [{"name": "default", "template": "D"}], "eos_token": {"content": "<|im_end|>"}}'
    generation = '{"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "max_new_tokens": 99}'
    folder = model_folder(tmp_path, config, generation_config=generation)

    def rendered(**flags: Any) -> str:
        template = assets_of(folder, **flags).chat_template
        return str(template.render(CHAT, add_generation_prompt=True, continue_final_message=False, variables={}))

    assert rendered() == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert rendered() == "F"
    own = tmp_path / "own.jinja"
    own.write_text("O")
    assert rendered(chat_template=str(own)) == "O"
    assert rendered(chat_template="{{ 'T' }}") == "T"
    with pytest.raises(SettingError, match="--chat-template"):
        rendered(chat_template="nowhere.jinja")
    with pytest.raises(SettingError, match="--chat-template"):
        rendered(chat_template="{% if %}")
    assets = assets_of(folder)
    assert assets.eos_token_ids == {2, 5, 6}
    assert assets.defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert assets_of(folder, generation_config="vllm").defaults == {}
