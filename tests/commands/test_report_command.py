"""`sage-grpo report`, and what `train` leaves when it ends."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from threading import Thread

import pytest

from report_zoo import fake_run
from sage_grpo.cli import main
from sage_grpo.report.watch import Server


def test_watch_prints_an_address_that_answers(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    run, answers = fake_run(tmp_path / "run"), []

    def once(server: Server) -> None:
        """One request from outside, then Ctrl-C."""
        address = capsys.readouterr().out.split()[2]
        asking = Thread(target=lambda: answers.append(urllib.request.urlopen(address, timeout=30).read()))
        asking.start()
        server.handle_request()
        asking.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", once)
    assert main(["report", "--watch", str(run)]) == 0
    assert b"sage-grpo report" in answers[0]
    assert not (run / "report.html").exists()
