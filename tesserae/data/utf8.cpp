#include "tesserae/data/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tesserae::data {

namespace {

/// Bytes of the character that starts with `lead` and the range of its second byte, which excludes overlong forms,
/// surrogates and too high code points. 0 bytes: no character starts so.
struct Form {
  int bytes;
  uint8_t low, high;
};

Form form_of(uint8_t lead) {
  if (lead < 0x80) return {1, 0, 0};
  if (lead < 0xC2) return {0, 0, 0};
  if (lead < 0xE0) return {2, 0x80, 0xBF};
  if (lead == 0xE0) return {3, 0xA0, 0xBF};
  if (lead == 0xED) return {3, 0x80, 0x9F};
  if (lead < 0xF0) return {3, 0x80, 0xBF};
  if (lead == 0xF0) return {4, 0x90, 0xBF};
  if (lead < 0xF4) return {4, 0x80, 0xBF};
  if (lead == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

bool is_utf8(std::string_view bytes) {
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  const auto* const end = at + bytes.size();
  while (at != end) {
    // Most text is ASCII: eight bytes at once.
    uint64_t eight = 0;
    while (end - at >= 8 && (std::memcpy(&eight, at, 8), (eight & 0x8080808080808080u) == 0)) at += 8;
    if (at == end) return true;

    const Form form = form_of(*at);
    if (form.bytes == 0 || end - at < form.bytes) return false;
    if (form.bytes >= 2 && (at[1] < form.low || at[1] > form.high)) return false;
    for (int i = 2; i < form.bytes; ++i) {
      if ((at[i] & 0xC0) != 0x80) return false;
    }
    at += form.bytes;
  }
  return true;
}

size_t broken_off(std::string_view block) {
  for (size_t back = 1; back <= std::min<size_t>(3, block.size()); ++back) {
    const auto byte = static_cast<uint8_t>(block[block.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    return static_cast<size_t>(form_of(byte).bytes) > back ? back : 0;
  }
  return 0;
}

}  // namespace tesserae::data
