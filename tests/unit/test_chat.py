"""Chat templates: what they are offered, what they cannot do, and what a caller is told."""

from datetime import datetime
from pathlib import Path

import pytest

from service.errors import InvalidRequestError, ModelFolderError
from service.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate

USER = [("user", "Hi")]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def refused(template: ChatTemplate, messages: list[tuple[str, str]] = USER) -> str:
    """The message of the error that rendering raises."""
    with pytest.raises(InvalidRequestError, match=r"^messages: ") as caught:
        template.render(messages)
    assert caught.value.field == "messages"
    return str(caught.value)


class TestRendering:
    def test_messages_are_rendered_up_to_the_answer(self) -> None:
        messages = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "<b> & 'q' {{ x }}")]
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n<b> & 'q' {{ x }}<|im_end|>\n"
        )
        assert expected + "<|im_start|>assistant\n" == ChatTemplate(CHATML).render(messages)
        assert expected == ChatTemplate(CHATML).render(messages, add_generation_prompt=False)

    def test_special_tokens_are_offered_by_name(self) -> None:
        source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(USER) == "<s>Hi</s>"
        assert ChatTemplate(source).render(USER) == "Hi"

    def test_blocks_leave_no_blank_lines_or_indent(self) -> None:
        source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
        assert ChatTemplate(source).render(USER) == "Hi\n"

    def test_tools_and_documents_are_none(self) -> None:
        source = "{% if tools is not none or documents is not none %}tools{% else %}plain{% endif %}"
        assert ChatTemplate(source).render(USER) == "plain"

    def test_json_keeps_letters_and_angle_brackets(self) -> None:
        source = "{{ messages[0] | tojson }}{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1, sort_keys=true) }}"
        expected = '{"role": "user", "content": "<é>"}{\n "a": [\n  1,\n  2\n ],\n "b": 1\n}'
        assert expected == ChatTemplate(source).render([("user", "<é>")])

    def test_time_is_the_callers_clock(self) -> None:
        template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", now=lambda: datetime(2024, 7, 26))
        assert template.render(USER) == "26 July 2024"

    def test_loop_controls_and_generation_blocks_are_understood(self) -> None:
        source = (
            "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        )
        assert ChatTemplate(source).render([("user", "Q"), ("assistant", "A"), ("assistant", "B")]) == "A"

    def test_template_comes_from_the_model_folder(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}ü{{ messages[0].content }}", "utf-8")
        template = ChatTemplate.load(tmp_path, bos_token="<s>")
        assert template.is_available
        assert template.render(USER) == "<s>üHi"


class TestRefusals:
    def test_a_model_without_template_says_so(self, tmp_path: Path) -> None:
        template = ChatTemplate.load(tmp_path)
        assert not template.is_available
        assert refused(template) == "messages: ['user'] is not allowed: the model has no chat template"

    def test_no_messages_are_refused(self) -> None:
        assert "at least one message" in refused(ChatTemplate(CHATML), [])

    def test_the_templates_own_complaint_reaches_the_caller(self) -> None:
        source = "{% if messages[0].role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        message = refused(ChatTemplate(source), [("user", "secret"), ("user", "secret")])
        complaint = "the model's chat template refuses them: roles must alternate"
        assert f"messages: ['user', 'user'] is not allowed: {complaint}" == message

    @pytest.mark.parametrize("expression", ["1 // 0", "messages[0] + 1", "unknown.attribute"])
    def test_whatever_goes_wrong_is_the_messages_error(self, expression: str) -> None:
        refused(ChatTemplate("{{ " + expression + " }}"))

    def test_content_is_never_shown(self) -> None:
        assert "secret" not in refused(ChatTemplate("{{ 1 // 0 }}"), [("user", "secret")])

    @pytest.mark.parametrize("source", ["{% for %}", "{{ messages", "{% unknown %}", "{{ 'a' | no_such_filter }}"])
    def test_invalid_jinja_is_the_model_folders_error(self, source: str) -> None:
        with pytest.raises(ModelFolderError, match=r"^chat template: "):
            ChatTemplate(source)

    def test_unreadable_template_is_the_model_folders_error(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(ModelFolderError, match=r"chat_template\.jinja: cannot be read"):
            ChatTemplate.load(tmp_path)


class TestSandbox:
    @pytest.mark.parametrize(
        "expression",
        [
            "messages.__class__",
            "''.__class__.__mro__[1].__subclasses__()",
            "messages[0].__init__.__globals__",
            "raise_exception.__globals__",
            "strftime_now.__closure__",
            "self.__init__.__globals__",
            "cycler.__init__.__globals__.os",
            "namespace.__init__.__globals__",
            "(messages | map(attribute='__class__') | list)[0].__subclasses__()",
            "messages | attr('__class__') | attr('__subclasses__')",
            "'{0.__class__.__mro__}'.format(messages)",
            "'%s' | format(messages.__class__.__base__.__subclasses__())",
        ],
    )
    def test_pythons_internals_are_out_of_reach(self, expression: str) -> None:
        template = ChatTemplate("[{{ " + expression + " }}]")
        try:
            shown = template.render(USER)
        except InvalidRequestError:
            return
        # Some lookups yield nothing instead of an error.
        assert "class" not in shown
        assert "function" not in shown

    @pytest.mark.parametrize(
        "statement",
        [
            "messages.append(1)",
            "messages.clear()",
            "messages[0].update({'content': 'changed'})",
            "messages[0].pop('content')",
            "messages.sort()",
            "messages[0].__setitem__('content', 'changed')",
        ],
    )
    def test_what_a_template_is_given_cannot_be_changed(self, statement: str) -> None:
        messages = [("user", "Hi"), ("user", "there")]
        refused(ChatTemplate("{{ " + statement + " }}"), messages)
        assert messages == [("user", "Hi"), ("user", "there")]

    @pytest.mark.parametrize("name", ["open", "__import__", "eval", "exec", "lipsum", "globals", "getattr"])
    def test_no_builtin_of_python_is_there(self, name: str) -> None:
        refused(ChatTemplate("{{ " + name + "('x') }}"))

    @pytest.mark.parametrize("statement", ["include", "import", "extends"])
    def test_no_other_template_can_be_loaded(self, statement: str) -> None:
        suffix = " as x" if statement == "import" else ""
        refused(ChatTemplate("{% " + statement + " '/etc/passwd'" + suffix + " %}"))


class TestBounds:
    def test_template_size_is_limited(self) -> None:
        assert ChatTemplate("x" * MAX_TEMPLATE_CHARS).render(USER) == "x" * MAX_TEMPLATE_CHARS
        with pytest.raises(ModelFolderError, match=f"{MAX_TEMPLATE_CHARS + 1} characters, more than"):
            ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))

    def test_output_size_is_limited(self) -> None:
        source = "{% for m in messages %}{{ m.content }}{% endfor %}"
        template = ChatTemplate(source, max_rendered_chars=10)
        assert template.render([("user", "01234"), ("user", "56789")]) == "0123456789"
        assert "more than 10 characters" in refused(template, [("user", "01234"), ("user", "567890")])

    def test_endless_output_stops_at_the_limit(self) -> None:
        source = "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
        assert "more than 1000 characters" in refused(ChatTemplate(source, max_rendered_chars=1000))

    @pytest.mark.parametrize(
        ("expression", "reason"),
        [
            ("range(100001) | list", "Range too big"),
            ("range(1000000000000) | length", "Range too big"),
            ("('a' * 1000000000000) | length", "a value of size 1000000000000 is more than"),
            ("(1000000000000 * [1, 2]) | length", "a value of size 2000000000000 is more than"),
            ("9 ** (9 ** 9)", "a value of size 1549681956 is more than"),
        ],
    )
    def test_huge_values_are_refused_before_they_are_made(self, expression: str, reason: str) -> None:
        assert reason in refused(ChatTemplate("{{ " + expression + " }}"))

    @pytest.mark.parametrize(("expression", "value"), [("'ab' * 3", "ababab"), ("2 ** 10", "1024"), ("3 * 4", "12")])
    def test_small_products_and_powers_work(self, expression: str, value: str) -> None:
        assert value == ChatTemplate("{{ " + expression + " }}").render(USER)

    def test_endless_recursion_is_refused(self) -> None:
        assert "recursion" in refused(ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"))
