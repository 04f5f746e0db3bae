// The programs of a Kubernetes cluster of one node, as one program, so that what they share is compiled and stored once:
//
//	kubernetes etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kubectl ARGUMENTS
//	kubernetes device-plugin FOLDER RESOURCE DEVICE...
//
// The last is a device plugin that offers devices without hardware; see device_plugin.go.
package main

import (
	"context"
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: kubernetes PROGRAM ARGUMENTS")
		os.Exit(2)
	}
	program := os.Args[1]
	os.Args = append([]string{program}, os.Args[2:]...)
	switch program {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kubelet":
		os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background())))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	case "device-plugin":
		if err := devicePlugin(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "device-plugin:", err)
			os.Exit(1)
		}
	default:
		fmt.Fprintln(os.Stderr, "no such program:", program)
		os.Exit(2)
	}
}
