#include "tesserae/os/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/fork.h"

namespace tesserae::os {
namespace {

struct LoadedLibrary {
  std::string path;
  uintptr_t base = 0;  // added to the addresses of its file
  std::vector<ElfW(Phdr)> segments;

  bool has(uintptr_t address) const {
    return std::ranges::any_of(segments, [&](const ElfW(Phdr) & segment) {
      return segment.p_type == PT_LOAD && address - base - segment.p_vaddr < segment.p_memsz;
    });
  }
  std::string name() const { return path.substr(path.rfind('/') + 1); }
};

std::vector<LoadedLibrary> loaded_libraries() {
  std::vector<LoadedLibrary> all;
  const auto add = [](dl_phdr_info* info, size_t, void* argument) {
    auto& found = *static_cast<std::vector<LoadedLibrary>*>(argument);
    LoadedLibrary library{.path = info->dlpi_name, .base = info->dlpi_addr, .segments = {}};
    library.segments.assign(info->dlpi_phdr, info->dlpi_phdr + info->dlpi_phnum);
    found.push_back(std::move(library));
    return 0;
  };
  {
    const NoForkMeanwhile no_fork;  // the loader's lock
    ::dl_iterate_phdr(add, &all);
  }
  if (!all.empty() && all[0].path.empty()) {  // the program itself
    char path[4096];
    const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
    if (length > 0) all[0].path.assign(path, static_cast<size_t>(length));
  }
  return all;
}

/// The table of symbols of an ELF file: the full one, or that of exported symbols if it was stripped.
class SymbolFile {
 public:
  explicit SymbolFile(const LoadedLibrary& library)
      : file_(::open(library.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    ElfW(Ehdr) header{};
    if (!file_ || !read(0, &header, sizeof header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return;
    // A file that was replaced since it was loaded would give wrong names.
    const auto segments = table<ElfW(Phdr)>(header.e_phoff, header.e_phnum);
    const size_t bytes = segments.size() * sizeof(ElfW(Phdr));
    if (segments.size() != library.segments.size() ||
        std::memcmp(segments.data(), library.segments.data(), bytes) != 0) {
      return;
    }
    const auto sections = table<ElfW(Shdr)>(header.e_shoff, header.e_shnum);
    for (const auto kind : {SHT_SYMTAB, SHT_DYNSYM}) {
      const auto found = std::ranges::find(sections, static_cast<ElfW(Word)>(kind), &ElfW(Shdr)::sh_type);
      if (found == sections.end() || found->sh_link >= sections.size()) continue;
      symbols_ = table<ElfW(Sym)>(found->sh_offset, found->sh_size / sizeof(ElfW(Sym)));
      names_ = sections[found->sh_link].sh_offset;
      return;
    }
  }

  const std::vector<ElfW(Sym)>& symbols() const { return symbols_; }

  std::string name(const ElfW(Sym) & symbol) const {
    std::string text(4096, '\0');  // libtorch has longer ones, which nobody reads to their end
    const ssize_t count = ::pread(file_.get(), text.data(), text.size(), static_cast<off_t>(names_ + symbol.st_name));
    text.resize(count < 0 ? 0 : ::strnlen(text.data(), static_cast<size_t>(count)));
    return text;
  }

 private:
  bool read(uint64_t offset, void* memory, size_t bytes) const {
    for (size_t done = 0; done < bytes;) {
      const ssize_t count =
          ::pread(file_.get(), static_cast<char*>(memory) + done, bytes - done, static_cast<off_t>(offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      done += static_cast<size_t>(count);
    }
    return true;
  }
  template <class Entry>
  std::vector<Entry> table(uint64_t offset, size_t count) const {
    constexpr size_t most_bytes = size_t{1} << 30;
    if (count > most_bytes / sizeof(Entry)) return {};
    std::vector<Entry> entries(count);
    if (!read(offset, entries.data(), count * sizeof(Entry))) entries.clear();
    return entries;
  }

  Descriptor file_;
  std::vector<ElfW(Sym)> symbols_;
  uint64_t names_ = 0;  // where they begin in the file
};

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
                                                    &std::free);
  return status == 0 && text ? short_symbol(text.get()) : short_symbol(symbol);
}

/// Names those of the sorted addresses that lie in the library.
void name_code_of(const LoadedLibrary& library, std::span<const uintptr_t> addresses,
                  std::map<uintptr_t, std::string>& names) {
  const SymbolFile file(library);
  // The shortest symbol around each address: a symbol may lie within another.
  std::map<uintptr_t, const ElfW(Sym)*> best;
  for (const ElfW(Sym) & symbol : file.symbols()) {
    const auto type = symbol.st_info & 0xf;
    if ((type != STT_FUNC && type != STT_GNU_IFUNC) || symbol.st_shndx == SHN_UNDEF) continue;
    const uintptr_t begin = library.base + symbol.st_value;
    for (auto at = std::ranges::lower_bound(addresses, begin); at != addresses.end() && *at - begin < symbol.st_size;
         ++at) {
      const ElfW(Sym)*& known = best[*at];
      if (known == nullptr || symbol.st_size < known->st_size) known = &symbol;
    }
  }
  for (const auto& [address, symbol] : best) {
    names[address] = cat(demangled(file.name(*symbol)), " (", library.name(), ")");
  }
}

/// Where the bracket that opens at `open` closes; npos: nowhere.
size_t closing(std::string_view text, size_t open) {
  const char opens = text[open], closes = opens == '<' ? '>' : ')';
  int depth = 0;
  for (size_t at = open; at < text.size(); ++at) {
    if (text[at] == opens) ++depth;
    if (text[at] == closes && text[at - 1] != '-' && --depth == 0) return at;  // -> closes nothing
  }
  return std::string_view::npos;
}

/// Leaves out what is in the brackets that are nested `level` deep. Those of operator< and
/// of (anonymous namespace) hold none.
std::string without_arguments(std::string_view text, char opens, int level) {
  std::string result;
  int depth = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    const char closes = opens == '<' ? '>' : ')';
    const bool is_operator = opens == '<' ? result.ends_with("operator") || result.ends_with("operator<")
                                          : text.substr(at).starts_with("(anonymous namespace)");
    if (text[at] == opens && !is_operator) {
      const size_t end = closing(text, at);
      if (depth == level && end != std::string_view::npos && end > at + 4) {
        result += cat(opens, "...", closes);
        at = end;
        continue;
      }
      ++depth;
    } else if (text[at] == closes && !is_operator && !result.ends_with('-') && depth > 0) {
      --depth;
    }
    result += text[at];
  }
  return result;
}

}  // namespace

std::string short_symbol(std::string_view demangled_name, size_t limit) {
  constexpr std::string_view long_string =
      "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >";
  std::string text(demangled_name);
  for (size_t at = 0; (at = text.find(long_string, at)) != std::string::npos;) {
    text.replace(at, long_string.size(), "std::string");
  }
  for (int level = 3; level >= 0 && text.size() > limit; --level) text = without_arguments(text, '<', level);
  if (text.size() > limit) text = without_arguments(text, '(', 0);
  if (text.size() > limit) text = text.substr(0, limit - 3) + "...";
  return text;
}

std::map<uintptr_t, std::string> names_of_code(std::span<const uintptr_t> addresses) {
  std::map<uintptr_t, std::string> names;
  for (const uintptr_t address : addresses) names.emplace(address, cat("0x", std::hex, address));
  std::vector<uintptr_t> sorted;
  for (const auto& [address, name] : names) sorted.push_back(address);
  for (const LoadedLibrary& library : loaded_libraries()) {
    std::vector<uintptr_t> own;
    std::ranges::copy_if(sorted, std::back_inserter(own), [&](uintptr_t address) { return library.has(address); });
    for (const uintptr_t address : own) names[address] = cat(library.name(), "+0x", std::hex, address - library.base);
    if (!own.empty()) name_code_of(library, own, names);
  }
  return names;
}

}  // namespace tesserae::os
