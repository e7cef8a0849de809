#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace tesserae::os {

/// What code of this process is called, for people: "at::native::add(at::Tensor const&, at::Tensor const&)
/// (libtorch_cpu.so)", or "tesserae+0x12f3" (an offset in the file, for addr2line) where no symbol is known, or
/// "0x7f..." where no library is.
///
/// All addresses at once: each library's table of symbols, which has half a million entries in libtorch, is read once.
/// From its file, and not by dladdr(3), which knows exported symbols only, and for ever waits for a thread that hangs
/// within dlopen. Thread-safe. An unreadable file means no symbols, never an error; on a file system that hangs it
/// waits.
std::map<uintptr_t, std::string> names_of_code(std::span<const uintptr_t> addresses);

/// A demangled name, fit for a line: std::string by its short name, and, while there are more than `limit` characters,
/// the innermost arguments of templates and then those of functions left out ("..."); cut if that is not enough.
std::string short_symbol(std::string_view demangled, size_t limit = 160);

}  // namespace tesserae::os
