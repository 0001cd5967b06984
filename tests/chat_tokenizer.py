"""A small tokenizer with a chat template, and models of its vocabulary."""

from small_corpus import make_documents

from asymloop_hf.tokenizer import train_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def chat_tokenizer():
    tokenizer = train_tokenizer(make_documents(50), 300)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def fields_for(tokenizer) -> dict:
    """The fields of a configuration that a tokenizer decides."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {"vocab_size": len(tokenizer), **special}
