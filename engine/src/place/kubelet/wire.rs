//! The part of the kubelet's PodResources API, version 1, that lists the devices of each container.
//!
//! Enters: the answer's bytes. Leaves: messages. Other fields (processors, memory, topology) are skipped. Absent on
//! purpose: claims of dynamic resource allocation, whose devices have driver-specific names instead of UUIDs.

/// The method that lists the devices of all containers of the node.
pub(super) const LIST: &str = "/v1.PodResourcesLister/List";

/// The answer: `ListPodResourcesResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Pods {
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<Pod>,
}

/// `PodResources`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Pod {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// `ContainerResources`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
}

/// `ContainerDevices`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}
