"""Clips survive the trip through files."""

from __future__ import annotations

import random

import av
import pytest
import torch
from PIL import Image

from sage_grpo.types import Sound, VideoSpec
from sage_grpo.utils import video
from sage_grpo.utils.video import contact_sheet, read_image, read_sound, read_video, write_mp4


def smooth_clip(frames: int = 6, height: int = 32, width: int = 48) -> torch.Tensor:
    """A gradient that moves: video codecs are made for such things."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    clip = torch.stack([torch.stack([x, y, (x + y) / 2 * t / frames], -1) for t in range(frames)])
    return (clip * 255).to(torch.uint8)


@pytest.mark.parametrize(("height", "width", "fps"), [(32, 48, 12.5), (31, 45, 24000 / 1001)])
def test_mp4_round_trip(height: int, width: int, fps: float, tmp_path) -> None:
    clip = smooth_clip(6, height, width)
    read, rate = read_video(write_mp4(tmp_path / "a" / "clip.mp4", clip, fps))
    assert read.shape == clip.shape
    assert rate == pytest.approx(fps, rel=1e-4)
    assert (read.float() - clip.float()).abs().mean() < 4
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["clip.mp4"]


def test_what_is_no_video_says_so(tmp_path) -> None:
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read as a video"):
        read_video(tmp_path / "text.mp4")
    with pytest.raises(FileNotFoundError, match="There is no video"):
        read_video(tmp_path / "none.mp4")
    with pytest.raises(ValueError, match="uint8 F x H x W x 3"):
        write_mp4(tmp_path / "x.mp4", torch.zeros(1, 3, 4, 4), 8)


def test_contact_sheet_shows_evenly_spaced_frames(tmp_path) -> None:
    clip = torch.zeros(9, 8, 8, 3, dtype=torch.uint8)
    clip[:, ..., 0] = torch.arange(9, dtype=torch.uint8)[:, None, None] * 20
    file = contact_sheet(tmp_path / "sheet.png", [clip, clip], columns=3, cell=8)
    sheet = read_image(file)
    assert sheet.shape == (8 + 3 + 8, 3 * 8 + 2 * 3, 3)
    assert sheet[0, ::11, 0].tolist() == [0, 80, 160]
    assert bool((sheet[:, 8:11] == 255).all())  # frames stand apart
    captioned = read_image(contact_sheet(tmp_path / "sheet.png", [clip], ["gypsy"], columns=3, cell=80))
    assert captioned.shape[0] == 80 + 24
    assert bool((captioned[22:24] == 255).all()), "letters are whole, with their tails"
    long = contact_sheet(tmp_path / "sheet.png", [clip, clip], ["a cat that runs"] * 2, columns=3, cell=8)
    assert bool((read_image(long)[:24, -3:] == 255).all())  # cut within the width


def test_images_are_read_as_rgb(tmp_path) -> None:
    Image.new("L", (4, 3), 7).save(tmp_path / "grey.png")
    assert read_image(tmp_path / "grey.png").tolist() == [[[7, 7, 7]] * 4] * 3
    (tmp_path / "no.png").write_text("x")
    with pytest.raises(ValueError, match="not an image"):
        read_image(tmp_path / "no.png")


def test_captions_are_written_with_a_font_of_their_letters(tmp_path, monkeypatch) -> None:
    from matplotlib import font_manager

    usual = font_manager.findfont("DejaVu Sans")
    wide = [font_manager.FontEntry(fname="cjk", name="Noto Sans CJK JP", style="normal")]
    for faces, file in (([], usual), (wide, "cjk")):
        monkeypatch.setattr(font_manager.fontManager, "ttflist", faces)
        assert video.caption_font(["a cat", "猫"]) == file
        assert video.caption_font(["Ω naïve, Привет, سلام"]) == usual
    assert video._line("a\nb\u200d\ufe0f") == "a b"
    monkeypatch.undo()
    sheet = contact_sheet(tmp_path / "a.png", [smooth_clip()], ["a cat 猫 here"], cell=64)
    assert bool((read_image(sheet)[:24] < 100).any())
    assert read_image(sheet).shape == (24 + 64, 6 * 96 + 5 * 3, 3)  # twice as large


def test_the_same_clip_gives_the_same_file(tmp_path) -> None:
    """Whatever was in memory before: x264's lookahead reads what nobody wrote, and files that are read in between leave it there."""
    t, y, x, colour = torch.meshgrid(*(torch.arange(n) for n in (13, 47, 38, 3)), indexing="ij")
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(0))
    wave = torch.sin((x + 3 * t * (colour + 1)) / 7) * torch.cos((y - 2 * t) / 5)
    clip = (128 + 100 * wave + 4 * noise).clamp(0, 255).to(torch.uint8)
    files = set()
    for number in range(10):
        file = write_mp4(tmp_path / f"{number}.mp4", clip, 8.0)
        _litter = [bytearray(random.randbytes(random.randrange(200, 200_000))) for _ in range(10)]
        read_video(file)
        files.add(file.read_bytes())
    assert len(files) == 1


def test_an_encoder_is_asked_for_nothing_that_depends_on_the_machine(tmp_path) -> None:
    """x264 writes its settings into the file: as many threads everywhere, and no lookahead."""
    settings = write_mp4(tmp_path / "a.mp4", smooth_clip(), 8).read_bytes().decode("latin1")
    for setting in ("threads=1 ", "rc=cqp ", "mbtree=0", "scenecut=0", "weightp=0", "bframes=0"):
        assert setting in settings


def test_a_small_file_that_fills_the_memory_is_refused(tmp_path, monkeypatch) -> None:
    clip = smooth_clip()
    file = write_mp4(tmp_path / "clip.mp4", clip, 8, sound=Sound(torch.zeros(2, 16000), 16000))
    frames, heard = read_video(file)[0], read_sound(file)
    for largest, read in ((clip.numel() - 1, read_video), (2 * 4 * 16000 - 1, read_sound)):
        monkeypatch.setattr(video, "LARGEST", largest)
        said = r"clip.mp4 takes more than .* GB of memory .* cut it or scale it down"
        with monkeypatch.context() as patch:
            patch.setattr(torch, "from_numpy", None)  # refused before a frame is decoded
            with pytest.raises(ValueError, match=said):
                read(file)
    monkeypatch.setattr(video, "LARGEST", clip.numel())
    assert torch.equal(read_video(file)[0], frames)
    monkeypatch.setattr(video, "LARGEST", heard.waves.nbytes)
    assert torch.equal(read_sound(file).waves, heard.waves)
    monkeypatch.setattr(video, "LARGEST", clip.numel() - 1)
    for frame in clip:  # a stream without any header
        Image.fromarray(frame.numpy()).save(tmp_path / "one.jpeg")
        with (tmp_path / "clip.mjpeg").open("ab") as stream:
            stream.write((tmp_path / "one.jpeg").read_bytes())
    with pytest.raises(ValueError, match="takes more than"):
        read_video(tmp_path / "clip.mjpeg")
    monkeypatch.setattr(video, "LARGEST", clip.numel())
    assert read_video(tmp_path / "clip.mjpeg")[0].shape == clip.shape


def test_a_picture_of_a_few_kilobytes_that_fills_the_memory_is_refused(tmp_path) -> None:
    Image.new("1", (10_000, 10_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"bomb.png is too large a picture: .* Scale it down"):
        read_image(tmp_path / "bomb.png")


def test_headers_say_how_long_and_how_large_a_clip_is_and_whether_it_is_heard(tmp_path) -> None:
    silent = write_mp4(tmp_path / "a.mp4", smooth_clip(6, 32, 48), 12.5)
    heard = write_mp4(tmp_path / "b.mp4", smooth_clip(6, 31, 47), 8, sound=Sound(torch.full((2, 16000), 0.25), 16000))
    assert video.video_format(silent) == VideoSpec(frames=6, height=32, width=48, fps=12.5)
    assert video.video_format(heard) == VideoSpec(frames=6, height=31, width=47, fps=8)
    assert (video.has_sound(heard), video.has_sound(silent)) == (True, False)
    assert read_sound(silent) is None
    sound = read_sound(heard)
    assert sound is not None
    assert (sound.rate, len(sound.waves)) == (16000, 2)
    assert float(sound.waves[:, 4000:12000].mean()) == pytest.approx(0.25, abs=0.02)
    mono = read_sound(write_mp4(tmp_path / "c.mp4", smooth_clip(), 8, sound=Sound(torch.zeros(1, 16000), 16000)))
    assert mono is not None
    assert len(mono.waves) == 1
    loud = Sound(torch.tensor([[3.0], [-3.0]]).expand(2, 16000), 16000)
    with av.open(str(write_mp4(tmp_path / "d.mp4", smooth_clip(), 8, sound=loud))) as container:
        waves = torch.cat([torch.from_numpy(frame.to_ndarray()) for frame in container.decode(audio=0)], dim=1)
    assert waves[:, 4000:12000].mean(1).tolist() == pytest.approx([1, -1], abs=0.1)
    for file, kinds in ((heard, "yuv444p"), (silent, "yuv420p")):
        with av.open(str(file)) as container:
            assert container.streams.video[0].codec_context.pix_fmt == kinds
    first, *rest = (Image.fromarray(frame.numpy()) for frame in smooth_clip(4))
    first.save(tmp_path / "clip.gif", save_all=True, append_images=rest, duration=100)  # does not say how many frames
    assert video.video_format(tmp_path / "clip.gif") == VideoSpec(
        frames=4, height=smooth_clip().shape[1], width=smooth_clip().shape[2], fps=10
    )
    (tmp_path / "text.mp4").write_text("x")
    assert not video.has_sound(tmp_path / "text.mp4")
    with pytest.raises(ValueError, match="cannot be read as a video"):
        video.video_format(tmp_path / "text.mp4")
    sizes = [write_mp4(tmp_path / f"{q}.mp4", smooth_clip(), 8, quality=q).stat().st_size for q in (0, 18, 40)]
    assert sizes == sorted(sizes, reverse=True)


def test_sounds_are_resampled_and_pictures_are_read_in_pairs(tmp_path) -> None:
    sound = Sound(torch.full((2, 8000), 0.5), 8000)
    assert video.resampled(sound, 8000) is sound
    other = video.resampled(sound, 16000)
    assert (other.rate, len(other.waves), abs(other.waves.shape[1] - 16000) < 100) == (16000, 2, True)
    assert float(other.waves[:, 2000:14000].mean()) == pytest.approx(0.5, abs=0.01)
    for name, size in (("a", (4, 3)), ("b", (4, 3)), ("c", (5, 3))):
        Image.new("RGB", size, (1, 2, 3)).save(tmp_path / f"{name}.png")
    a, b, c = (tmp_path / f"{name}.png" for name in "abc")
    assert video.read_pictures(None, a) is None
    assert [tuple(video.read_pictures(*some).shape) for some in ((a,), (a, b))] == [(3, 4, 3), (2, 3, 4, 3)]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="their sizes are 4 x 3 and 5 x 3"):
        video.read_pictures(a, c)
    with pytest.raises(FileNotFoundError, match="There is no image"):
        read_image(tmp_path / "none.png")
