#include "tesserae/train/run_folder.h"

#include "tesserae/base/error.h"
#include "tesserae/os/files.h"

namespace tesserae::train {

std::string make_run_folder(const std::string& wanted) {
  os::Files& files = os::files();
  std::string folder = wanted;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  const std::string base = folder;
  for (int number = 2;; ++number) {
    const os::FileKind kind = files.status(folder).kind;
    if (kind == os::FileKind::missing || (kind == os::FileKind::directory && files.list(folder).empty())) break;
    folder = cat(base, "-", number);
  }
  files.make_directories(folder);
  return folder;
}

}  // namespace tesserae::train
