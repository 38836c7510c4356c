#include <array>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>
#include <onnxruntime_cxx_api.h>

int main(int, char** arguments) {
  Ort::Env env;
  Ort::Session session(env, "model.onnx", Ort::SessionOptions());

  std::ifstream file(arguments[1], std::ios::binary);
  std::string kind, white;
  std::int64_t width, height;
  file >> kind >> width >> height >> white;
  file.get();
  std::vector<std::uint8_t> pixels(3 * width * height);
  file.read(reinterpret_cast<char*>(pixels.data()), pixels.size());

  std::array<std::int64_t, 3> shape{height, width, 3};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  auto picture = Ort::Value::CreateTensor<std::uint8_t>(memory, pixels.data(), pixels.size(), shape.data(), shape.size());
  const char *input = "pixels", *output = "label";
  auto answers = session.Run(Ort::RunOptions(), &input, &picture, 1, &output, 1);
  std::cout << answers[0].GetTensorData<std::int64_t>()[0] << std::endl;
}
