// One grow-only scratch buffer per thread. Knows nothing of what is kept in it; throws std::bad_alloc.
#pragma once
#include <cstdlib>
#include <new>

struct Workspace {
    void* data = nullptr;
    size_t size = 0;

    ~Workspace() { free(data); }

    template <class T>
    T* get(size_t count) {
        size_t wanted = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (wanted > size) {
            free(data);
            data = aligned_alloc(64, wanted);
            size = data ? wanted : 0;
            if (!data) throw std::bad_alloc();
        }
        return static_cast<T*>(data);
    }
};
