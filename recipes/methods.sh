#!/bin/sh
# Table 1 of the paper with all its methods, and those of its table of mini-ImageNet. In the folder of the image sets:
#
#     sh methods.sh PATH/OF/methods.toml
#
# trains what has to be trained into runs/methods (a stopped run goes on) and prints the table. Learning rates of Adam are
# those of Meta-Dataset's best models, or of the papers; methods that move the whole network get a tenth of theirs,
# because it is trained already.
set -e

train() {
    fewshot-mahalanobis meta-train --config "$recipe" --method "$1" --set learning_rate="$2" -o "runs/methods/$1"
}

recipe=${1:?"sh methods.sh PATH/OF/methods.toml"}
train protonet 2e-4
train matchingnet 5e-4
train relationnet 1e-4
train gaussian_protonet 2e-4
train tadam 2e-4
train tpn 1e-4
train gidaris 1e-3
train leo 1e-4
train protomaml 3e-5
train maml 3e-5

fewshot-mahalanobis evaluate --protocol variable -o runs/methods/table.json \
    mini_imagenet_test.zip omniglot.zip:test cub200_2010.zip:test quickdraw345.zip:test dtd10.zip:test \
    gtsrb.zip:test mnist.zip:test cifar10.zip:test cifar100_test.zip fashion_mnist.zip:test \
    --checkpoint resnet18 --head mahalanobis --method knn --method finetune --method matchingnet --method protonet --method tpn \
    --method runs/methods/maml/best --method runs/methods/relationnet/best --method runs/methods/matchingnet/best \
    --method runs/methods/protonet/best --method runs/methods/protomaml/best \
    --method runs/methods/gaussian_protonet/best --method runs/methods/gidaris/best \
    --method runs/methods/tadam/best --method runs/methods/tpn/best --method runs/methods/leo/best
