"""A tokenizer for tiny models: every id is one letter, so that texts can be read off ids."""

from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Spelled:
    """Ids to letters, round and round the alphabet."""

    chat_template = "{{ messages }}"

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": [LETTERS.index(letter) for letter in text]})

    def decode(self, ids: Any) -> str:
        return "".join(LETTERS[i % len(LETTERS)] for i in ids)

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Any:
        text = "".join(m["role"][0] + m["content"] for m in messages) + ("Z" if add_generation_prompt else "")
        return {"input_ids": self(text).input_ids}
