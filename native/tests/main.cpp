// Runs the kernels over many shapes without Python, under sanitizers (see sanitize.sh): `kernels_test [part...]`.
#include "check.h"

int main(int argc, char** argv) {
    const struct { const char* name; void (*run)(); } parts[] = {
        {"matmul", test::matmul}, {"rows", test::rows}, {"attention", test::attention}, {"pool", test::pool}, {"plan", test::plan}};
    int ran = 0;
    for (const auto& part : parts) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; ++i) wanted |= std::strcmp(argv[i], part.name) == 0;
        if (!wanted) continue;
        const int before = test::checks;
        part.run();
        ++ran;
        std::printf("%-10s %8d checks\n", part.name, test::checks - before);
    }
    if (!ran || !test::checks) {
        std::fprintf(stderr, "nothing was tested\n");
        return 2;
    }
    std::printf("%d checks, %d failed\n", test::checks, test::failures);
    return test::failures ? 1 : 0;
}
