#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings/bindings.h"
#include "tesserae/base/error.h"
#include "tesserae/data/documents.h"
#include "tesserae/data/loader.h"
#include "tesserae/data/token_writer.h"

namespace tesserae::bindings {
namespace {

using data::Loader;
using data::TokenStream;
using data::TokenWriter;

data::LoaderOptions loader_options(int64_t length, int64_t batch, int rank, int ranks, uint64_t seed,
                                   double validation_fraction) {
  return {.sequence_length = length,
          .batch_per_rank = batch,
          .accumulate = 1,
          .rank = rank,
          .ranks = ranks,
          .seed = seed,
          .validation_fraction = validation_fraction};
}

void add(TokenWriter& writer, const py::bytes& tokens) {
  const std::string_view bytes = tokens;
  if (bytes.size() % sizeof(uint32_t) != 0) {
    throw InvalidArgument("TokenWriter.add", cat(bytes.size(), " bytes are no whole number of uint32 tokens"));
  }
  const std::span<const uint32_t> numbers(reinterpret_cast<const uint32_t*>(bytes.data()),
                                          bytes.size() / sizeof(uint32_t));
  const py::gil_scoped_release release;
  writer.add(numbers);
}

}  // namespace

void bind_data(py::module_& module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<TokenStream, std::shared_ptr<TokenStream>>(module, "TokenStream",
                                                        "The tokens of files; see tesserae/data/token_stream.h.")
      .def(py::init([](const std::vector<std::string>& paths, const std::string& format,
                       std::vector<std::string> suffixes, int64_t vocabulary) {
             return std::make_shared<TokenStream>(data::StreamOptions{.paths = {paths.begin(), paths.end()},
                                                                      .format = data::format_from_name(format),
                                                                      .suffixes = std::move(suffixes),
                                                                      .vocabulary = vocabulary});
           }),
           py::arg("paths"), py::kw_only(), py::arg("format"), py::arg("suffixes") = std::vector<std::string>{},
           py::arg("vocabulary") = 0, without_gil)
      .def("__len__", &TokenStream::size)
      .def_property_readonly("files", &TokenStream::files)
      .def_property_readonly("vocabulary", &TokenStream::vocabulary)
      .def_property_readonly("document_end", &TokenStream::document_end);

  py::class_<Loader>(module, "Loader", "Batches of streams with weights; see tesserae/data/loader.h.")
      .def(py::init([](const std::vector<std::pair<std::shared_ptr<TokenStream>, double>>& sources, int64_t length,
                       int64_t batch, int rank, int ranks, uint64_t seed, double validation_fraction) {
             std::vector<data::Source> all;
             for (const auto& [stream, weight] : sources) all.push_back({stream, weight});
             return Loader(std::move(all), loader_options(length, batch, rank, ranks, seed, validation_fraction));
           }),
           py::arg("sources"), py::kw_only(), py::arg("length"), py::arg("batch"), py::arg("rank") = 0,
           py::arg("ranks") = 1, py::arg("seed") = 0, py::arg("validation_fraction") = 0.0, without_gil)
      .def_property_readonly("fingerprints", &Loader::fingerprints, "Of each source: the files that it has, in order.")
      .def_property_readonly("training_samples", &Loader::training_samples)
      .def_property_readonly("validation_samples", &Loader::validation_samples)
      .def_property_readonly("global_batch", &Loader::global_batch)
      .def(
          "training_batch",
          [](Loader& self, int64_t sample) {
            const data::Batch batch = self.training_batch(self.position(sample));
            return std::pair{batch.tokens, batch.targets};
          },
          py::arg("sample"), without_gil,
          "This rank's tokens and targets of the batch of all ranks that begins at that sample, counted from the "
          "start.")
      .def(
          "validation_batch",
          [](Loader& self, int64_t index) {
            if (self.validation_samples() == 0) {
              throw InvalidArgument("TokenDataset.validation_batch",
                                    "nothing is held out; give validation_fraction when the dataset is made");
            }
            const data::Batch batch = self.validation_batch(index);
            return std::pair{batch.tokens, batch.targets};
          },
          py::arg("index"), without_gil, "The same at every call.");

  module.def(
      "begins_as_token_file", [](const std::string& path) { return data::begins_as_token_file(path); }, py::arg("path"),
      without_gil, "Whether the file has the header of a token file.");
  module.def(
      "find_documents",
      [](const at::Tensor& tokens, int64_t document_end) {
        const data::Documents found = data::find_documents(tokens, document_end);
        return std::pair{found.positions, found.starts};
      },
      py::arg("tokens"), py::arg("document_end"), without_gil,
      "Positions in their documents, and where documents begin in the batch as one row; see "
      "tesserae/data/documents.h.");

  py::class_<TokenWriter>(module, "TokenWriter",
                          "Writes a token file (docs/format.md) from its first token to its last, in little memory: "
                          "there is no file of that name before finish().")
      .def(py::init([](const std::string& path, int64_t vocabulary, std::optional<int64_t> document_end,
                       int bytes_per_token, bool header, bool replace) {
             return std::make_unique<TokenWriter>(path, data::TokenWriterOptions{.vocabulary = vocabulary,
                                                                                 .document_end = document_end,
                                                                                 .bytes_per_token = bytes_per_token,
                                                                                 .header = header,
                                                                                 .replace = replace});
           }),
           py::arg("path"), py::kw_only(), py::arg("vocabulary"), py::arg("document_end") = std::nullopt,
           py::arg("bytes_per_token") = 0, py::arg("header") = true, py::arg("replace") = false, without_gil,
           "document_end: the token after each document. bytes_per_token: 2 or 4; 0: the fewest that hold the "
           "vocabulary. header=False: the tokens alone. Raises InvalidArgument, also for a file that is there unless "
           "replace=True, and IoError.")
      .def_property_readonly("tokens", &TokenWriter::tokens, "That were added.")
      .def_property_readonly("bytes_per_token", &TokenWriter::bytes_per_token, "In the file: 2 or 4.")
      .def("add", &add, py::arg("tokens"),
           "The bytes of uint32 numbers of this machine: array.array('I', ids).tobytes(). Raises InvalidArgument for "
           "one that "
           "is not below the vocabulary.")
      .def("finish", &TokenWriter::finish, without_gil, "The file has its name, and is on the disk, afterwards.")
      .def("discard", &TokenWriter::discard, without_gil, "Gives up what was not finished.");
}

}  // namespace tesserae::bindings
