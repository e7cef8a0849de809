#pragma once

namespace tesserae::sim {

/// Makes c10's guards, streams and events work on `sim` (guard.cpp), and what torch asks of any accelerator
/// (hooks.cpp). Once a program.
void install_guard();
void install_hooks();

}  // namespace tesserae::sim
