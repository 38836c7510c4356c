#!/bin/sh
# Table 1 of the paper with all its methods, and those of its table of mini-ImageNet. In the folder of the image sets:
#
#     sh methods.sh PATH/OF/methods.toml [EPISODES]
#
# trains what has to be trained into runs/methods (a stopped run goes on) and prints the table. Learning rates are those
# of Meta-Dataset's best models, or of the papers where they use Adam, with three exceptions. LEO's was chosen on
# validation classes for so few tasks. MatchingNet's and TPN's are a fifth and a tenth of the published ones, with which
# accuracy fell in training (MatchingNet was stopped after 50 of 250 steps). The rate of the network is a tenth of it.
set -e

train() {
    fewshot-mahalanobis meta-train --config "$recipe" --method "$1" --set learning_rate="$2" -o "runs/methods/$1"
}

recipe=${1:?"sh methods.sh PATH/OF/methods.toml [EPISODES]"}
train protonet 1.8e-3
train matchingnet 1e-3
train relationnet 9e-4
train gaussian_protonet 1.8e-3
train tadam 5e-4
train tpn 1e-4
train gidaris 1e-3
train leo 1e-2
train protomaml 3e-4
train maml 2.4e-4

fewshot-mahalanobis evaluate --protocol variable --episodes "${2:-600}" -o runs/methods/table.json \
    mini_imagenet_test.zip omniglot.zip:test cub200_2010.zip:test quickdraw345.zip:test dtd10.zip:test \
    gtsrb.zip:test mnist.zip:test cifar10.zip:test cifar100_test.zip fashion_mnist.zip:test \
    --checkpoint runs/second_edition --head mahalanobis --precision bfloat16 \
    --method knn --method finetune --method matchingnet --method protonet --method tpn \
    --method runs/methods/maml/best --method runs/methods/relationnet/best --method runs/methods/matchingnet/best \
    --method runs/methods/protonet/best --method runs/methods/protomaml/best \
    --method runs/methods/gaussian_protonet/best --method runs/methods/gidaris/best \
    --method runs/methods/tadam/best --method runs/methods/tpn/best --method runs/methods/leo/best
