package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Offers devices of one resource. A container that is given some finds their names in NVIDIA_VISIBLE_DEVICES, as
// NVIDIA's own plugin has it, and is given no device.
type plugin struct {
	deviceplugin.UnimplementedDevicePluginServer
	devices []string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *deviceplugin.Empty) (*deviceplugin.DevicePluginOptions, error) {
	return &deviceplugin.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *deviceplugin.Empty, stream deviceplugin.DevicePlugin_ListAndWatchServer) error {
	list := &deviceplugin.ListAndWatchResponse{}
	for _, id := range p.devices {
		list.Devices = append(list.Devices, &deviceplugin.Device{ID: id, Health: deviceplugin.Healthy})
	}
	if err := stream.Send(list); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *deviceplugin.AllocateRequest) (*deviceplugin.AllocateResponse, error) {
	response := &deviceplugin.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &deviceplugin.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}

// The kubelet removes the sockets of all plugins when it starts; each then has to listen and register anew.
func devicePlugin(arguments []string) error {
	if len(arguments) < 3 {
		return errors.New("usage: device-plugin FOLDER RESOURCE DEVICE...")
	}
	folder, resource, devices := arguments[0], arguments[1], arguments[2:]
	name := strings.ReplaceAll(resource, "/", "_") + ".sock"
	socket := filepath.Join(folder, name)
	for {
		if err := serve(folder, name, resource, devices); err != nil {
			fmt.Fprintln(os.Stderr, "device-plugin:", err)
			time.Sleep(500 * time.Millisecond)
			continue
		}
		for exists(socket) {
			time.Sleep(200 * time.Millisecond)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func serve(folder, name, resource string, devices []string) error {
	socket := filepath.Join(folder, name)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	deviceplugin.RegisterDevicePluginServer(server, &plugin{devices: devices})
	go server.Serve(listener)
	kubelet, err := grpc.NewClient("unix://"+filepath.Join(folder, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err == nil {
		defer kubelet.Close()
		_, err = deviceplugin.NewRegistrationClient(kubelet).Register(context.Background(), &deviceplugin.RegisterRequest{
			Version: deviceplugin.Version, Endpoint: name, ResourceName: resource,
		})
	}
	if err != nil {
		server.Stop()
		return fmt.Errorf("register %s: %w", resource, err)
	}
	fmt.Fprintln(os.Stderr, "registered", resource)
	return nil
}
