"""The shipped sample is text of the size that it is said to have, in documents."""

from pathlib import Path

import interp.data
from interp.training import read_documents

SAMPLE = Path(next(iter(interp.data.__path__))) / "sample.txt.gz"


def test_the_sample_holds_many_documents_of_prose() -> None:
    documents = read_documents(SAMPLE)
    assert sum(map(len, documents)) >= 300_000
    assert len(documents) > 400
    assert max(map(len, documents)) < 8_000
    assert any("Paris is the capital of France." in document for document in documents)
    printable = sum(character.isprintable() or character == "\n" for document in documents for character in document)
    assert printable == sum(map(len, documents))
