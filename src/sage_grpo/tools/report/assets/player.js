"use strict";
// One clock for all clips on the screen. They start a cycle together, are put right when they drift, and stop on the same frame.

const player = {
  playing: !matchMedia("(prefers-reduced-motion: reduce)").matches,
  rate: 1,
  videos: new Set(),
  origin: performance.now(), // when the cycle's zero was, at the present rate
  held: 0, // position while paused, in seconds
  checked: 0,
};

const fps = () => D.gallery.size.fps || 8;
const frames = () => Math.max(1, D.gallery.size.frames || 1);
const middle = (frame) => (frame + 0.5) / fps(); // inside a frame, where no rounding shows the one before

function period() {
  let longest = frames() / fps();
  for (const video of player.videos) if (Number.isFinite(video.duration)) longest = Math.max(longest, video.duration);
  return longest;
}

const position = () => (player.playing ? ((performance.now() - player.origin) / 1000) * player.rate : player.held);
const frameNow = () => Math.min(frames() - 1, Math.floor(position() * fps()));

function resting(video, seconds) {
  const last = Number.isFinite(video.duration) ? Math.max(0, video.duration - 0.5 / fps()) : seconds;
  return Math.min(seconds, last);
}

function place(video, seconds) {
  video.currentTime = resting(video, seconds);
}

function follow(video) {
  // A clip that has just come joins where the others are.
  player.videos.add(video);
  const join = () => {
    if (!player.videos.has(video)) return;
    video.playbackRate = player.rate;
    place(video, position());
    if (player.playing) video.play().catch(() => {});
  };
  if (video.readyState >= 1) join(); else video.addEventListener("loadedmetadata", join, { once: true });
}

function leave(video) {
  player.videos.delete(video);
  video.pause();
}

function seek(frame) {
  // Stop all clips on one frame.
  player.playing = false;
  player.held = middle(((frame % frames()) + frames()) % frames());
  for (const video of player.videos) { video.pause(); place(video, player.held); }
  showPlayer();
}

function resume() {
  player.playing = true;
  player.origin = performance.now() - (player.held / player.rate) * 1000;
  for (const video of player.videos) { place(video, player.held); video.play().catch(() => {}); }
  showPlayer();
}

const toggle = () => (player.playing ? seek(frameNow()) : resume());

function setRate(rate) {
  const now = position();
  player.rate = rate;
  player.origin = performance.now() - (now / rate) * 1000;
  for (const video of player.videos) video.playbackRate = rate;
}

function settle(now) {
  // A clip that was asked to play or seek a moment ago may still do so after all were stopped.
  if (now - player.checked < 100) return;
  player.checked = now;
  for (const video of player.videos) {
    if (video.readyState < 1 || video.seeking) continue;
    if (!video.paused) video.pause();
    if (Math.abs(video.currentTime - resting(video, player.held)) > 5e-4) place(video, player.held);
  }
}

function tick(now) {
  requestAnimationFrame(tick);
  if (!player.playing) return void settle(now);
  if (position() >= period()) {
    player.origin = now;
    for (const video of player.videos) { if (video.readyState >= 1) { video.currentTime = 0; video.play().catch(() => {}); } }
  } else if (now - player.checked > 200) {
    player.checked = now;
    const want = position();
    for (const video of player.videos) {
      if (video.readyState < 2 || want > video.duration - 1 / fps()) continue;
      if (Math.abs(video.currentTime - want) > Math.max(0.12, 1 / fps())) video.currentTime = want;
      if (video.paused) video.play().catch(() => {});
    }
  }
  showFrame();
}

function showFrame() {
  for (const input of document.querySelectorAll("input.frame")) if (document.activeElement !== input || player.playing) input.value = String(frameNow());
  for (const output of document.querySelectorAll("output.frame")) output.textContent = `frame ${frameNow() + 1}/${frames()}`;
}

function icon(playing) {
  const shape = playing ? "M3 2h4v12H3zM9 2h4v12H9z" : "M4 2l10 6-10 6z";
  return draw("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, draw("path", { d: shape, fill: "currentColor" }));
}

function showPlayer() {
  for (const button of document.querySelectorAll("button.play")) {
    button.replaceChildren(icon(player.playing));
    button.setAttribute("aria-label", player.playing ? "Pause" : "Play");
  }
  showFrame();
}

function playerControls() {
  const rate = options(make("select", { "aria-label": "Speed", class: "wide" }), [[1, "1×"], [0.5, "½×"], [0.25, "¼×"]], player.rate);
  rate.addEventListener("change", () => setRate(+rate.value));
  const scrub = make("input", { type: "range", class: "frame wide", min: "0", max: String(frames() - 1), value: "0", "aria-label": "Frame" });
  scrub.addEventListener("input", () => seek(+scrub.value));
  return [make("button", { type: "button", class: "play icon", title: "Play or pause (space)", onclick: toggle }, icon(player.playing)), rate, scrub, make("output", { class: "frame small soft wide" })];
}

// Where a clip is: in the page itself (made into an object when first needed) or in a file.
const blobs = new Map();
function address(clip) {
  if (D.clips.kind !== "inline") return D.clips.list[clip].split("/").map(encodeURIComponent).join("/");
  if (!blobs.has(clip)) {
    const bytes = Uint8Array.from(atob(D.clips.list[clip]), (letter) => letter.charCodeAt(0));
    blobs.set(clip, URL.createObjectURL(new Blob([bytes], { type: "video/mp4" })));
  }
  return blobs.get(clip);
}

function setClip(video, clip) {
  if (video.dataset.clip === String(clip)) return;
  leave(video);
  video.dataset.clip = String(clip);
  video.src = address(clip);
  follow(video);
}

function releaseClip(video) {
  leave(video);
  delete video.dataset.clip;
  video.removeAttribute("src");
  video.load(); // frees the decoder
}
