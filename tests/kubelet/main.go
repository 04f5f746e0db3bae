// The kubelet's PodResources service with Kubernetes' own messages and Google's own gRPC, but without a kubelet. It
// answers each List with the current content of a JSON file, and logs each call on stderr.
//
//	kubelet SOCKET FILE
//
// FILE contains the answer in protobuf's JSON form. If it cannot be read, List fails with the reason. An interrupt or
// SIGTERM ends it.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

type lister struct {
	podresources.UnimplementedPodResourcesListerServer
	file string
}

func (l *lister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	answer := &podresources.ListPodResourcesResponse{}
	text, err := os.ReadFile(l.file)
	if err == nil {
		err = protojson.Unmarshal(text, answer)
	}
	fmt.Fprintln(os.Stderr, "list", err)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return answer, nil
}

func main() {
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, &lister{file: os.Args[2]})
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-stop
		server.Stop()
	}()
	fmt.Fprintln(os.Stderr, "serving")
	if err := server.Serve(listener); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
