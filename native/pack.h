// From a file's rows to panels, losslessly. The layouts of the file formats are those of the GGUF specification.
#pragma once
#include <cstdint>
#include <string>

#include "panel.h"

namespace cutaway {

// The panel kind that holds a file format ("Q5_0", "F16", ...). False when there is none.
bool kind_of(const std::string& format, Kind* kind);

// Bytes of a row of `columns` values in the file.
size_t row_bytes(const std::string& format, int columns);

// Packs up to eight file rows (null: a row of zeros) into one panel of `w`. `panel` and `low` point at that panel.
void pack_panel(const std::string& format, const Matrix& w, const uint8_t* const rows[8], uint8_t* panel, uint8_t* low);

}  // namespace cutaway
